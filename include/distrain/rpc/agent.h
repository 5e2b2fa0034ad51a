#pragma once

#include <climits>
#include <concepts>
#include <map>
#include <tuple>
#include <utility>

#include "distrain/base/future.h"
#include "distrain/base/trace.h"
#include "distrain/membership/options.h"
#include "distrain/rpc/autograd_hook.h"
#include "distrain/rpc/channel.h"
#include "distrain/rpc/function_traits.h"
#include "distrain/rpc/rref.h"
#include "distrain/rpc/serialize.h"

namespace distrain::rpc {

class AgentCore;

/// Maps devices of this rank to devices of the rank `peer`: a tensor on the first device of a pair
/// arrives on the second. Must be one to one, because replies and gradients use the map in reverse.
/// CPU tensors arrive on the CPU.
struct DeviceMap {
  std::string peer;  ///< a rank's name
  std::vector<std::pair<c10::Device, c10::Device>> devices;
};

/// Options for joining a job (the members of membership::Options) and for running calls.
struct AgentOptions : membership::Options {
  /// Called once for each operation, such as a collective, that has waited for other ranks for at
  /// least `long_wait`. Runs on the loop thread: must not block.
  std::function<void(const Wait& wait)> on_long_wait;
  std::chrono::nanoseconds long_wait = std::chrono::seconds(30);
  std::chrono::nanoseconds rpc_timeout = std::chrono::seconds(60);
  /// This rank's device. Its default index is the rank modulo the number of devices. join() makes
  /// the device current on its thread and on the agent's threads. Tensors on this device arrive on
  /// the receiving rank's device if that is an accelerator too. Sending other accelerator tensors
  /// throws `invalid` unless a map covers them, because nothing is copied to the CPU implicitly.
  c10::Device device = c10::kCPU;
  std::vector<DeviceMap> device_maps;
  /// Fault injection: delays each call to another rank by this time.
  std::chrono::nanoseconds call_delay{0};
  /// Records this rank's trace once it is started. Must be set on all ranks or on none.
  std::shared_ptr<base::Tracer> tracer;
  /// Limits the bytes of received calls that have not begun: `peer_budget` for the calls of each
  /// rank, `total_budget` for the calls of all ranks. Half of `total_budget` (at least 32 KiB per
  /// rank) is reserved in equal shares. Begun but unanswered calls have a separate limit of
  /// `total_budget`. While a limit is reached, callers wait before they send calls, which fail
  /// with `overloaded` at their deadline. A single call may exceed a limit. Calls of at most 64 KiB
  /// may take 1 MiB for each rank, and an eighth of `total_budget` for all ranks, in addition;
  /// those that did have their own limit of `total_budget` once they have begun.
  uint64_t peer_budget = uint64_t{256} << 20;
  uint64_t total_budget = uint64_t{1} << 30;
  /// Lets large tensors from ranks on this host come through shared memory, for each rank as much
  /// as half of `total_budget` divided by the number of ranks, or `peer_budget` if that is less.
  /// Pages take memory once they are used.
  bool shared_memory = true;
  int worker_threads = 4;  ///< threads that run functions, not counting threads that wait
};

/// A component that is built on an agent and keeps state about other ranks, such as autograd
/// contexts or operations that wait for a rank. Registered with Agent::add_layer().
class Layer {
 public:
  virtual ~Layer() = default;
  /// Called once for each process of another rank that is lost, before any call of the rank's next
  /// process runs. When this agent ends, called for each remaining rank with the error `cancelled`.
  /// Must release the state kept for the rank and fail operations that wait for it with
  /// `loss.error`. Must be quick, because one thread notifies all layers.
  virtual void on_rank_lost(const Loss& loss) = 0;
  /// Called by Agent::shutdown() when all calls by this rank are answered. May call other ranks.
  virtual void on_shutdown() {}
  /// Returns the operations of this layer that wait for other ranks, which Agent::waits() includes.
  /// Called on any thread; must not block or throw.
  virtual std::vector<Wait> waits() const { return {}; }
};

struct WorkerInfo {
  int rank = -1;
  std::string name;
  uint32_t incarnation = 0;  ///< number of earlier processes of this rank: Note [Incarnations]
  bool operator==(const WorkerInfo&) const = default;
  static constexpr auto kFields =
      std::tuple(&WorkerInfo::rank, &WorkerInfo::name, &WorkerInfo::incarnation);
};

/// The destination of a call (a rank or a rank's name) and the timeout of the call.
class To {
 public:
  To(int rank) : rank_(rank) {}  // NOLINT: implicit by design
  template <std::integral R>
  To(R rank) : rank_(std::in_range<int>(rank) ? static_cast<int>(rank) : INT_MAX) {}  // NOLINT
  To(double) = delete;                                  // a rank has no fraction
  To(const char* name) : name_(name) {}                 // NOLINT
  To(std::string name) : name_(std::move(name)) {}      // NOLINT
  To(const WorkerInfo& worker) : rank_(worker.rank) {}  // NOLINT

  /// Sets a timeout for this call instead of the agent's rpc_timeout.
  To& timeout(std::chrono::nanoseconds limit) {
    timeout_ = limit;
    return *this;
  }
  /// Removes the timeout, for calls that last as long as the job. They fail if the peer is lost.
  To& without_deadline() { return timeout(std::chrono::nanoseconds::max()); }

 private:
  friend class Agent;
  int rank_ = -1;
  std::string name_;
  std::chrono::nanoseconds timeout_ = kAgentsTimeout;
};

/// Passed to an exposed function whose first parameter has this type.
struct CallContext {
  class Agent& agent;  ///< valid while the agent's threads run: Agent::lasting()
  WorkerInfo caller;
};

/// The function that made a call. A trace shows it: see TraceEvent.
enum class CallForm { kSync, kAsync, kRemote };

struct Traffic {
  uint64_t calls = 0;  ///< calls that this rank has made
  uint64_t bytes_out = 0;
  uint64_t bytes_in = 0;
};

/// A received reply that is not decoded yet.
struct RawReply {
  std::shared_ptr<InMessage> message;             ///< set if this rank called itself
  net::InFrame frame;                             ///< set if another rank replied
  std::shared_ptr<DeviceReceive> device_receive;  ///< source of its device tensors; may be null
  int from = -1;
  uint64_t context = 0;
  uint64_t sent = 0;  ///< send node of the call's arguments in `context`; 0 if none
  std::string function;
  /// Releases the contents if the reply is never opened. Null if there is nothing to release.
  std::shared_ptr<class UnopenedReply> unopened;

  /// Returns true if decoding the reply takes less time than handing it to a worker, and needs no
  /// device, no RRef and no autograd, so that any thread may decode it at once.
  bool is_plain() const;
  /// Marks the reply as opened. Returns false if it was already opened or given up.
  bool open() const;
  /// Unless the reply was opened, releases its contents and gives up the call.
  void give_up() const;
};

/// Answers one call, on the rank that runs the function. Only the first answer counts. Destroying a
/// Reply that gave no answer answers `cancelled`. May outlive the agent. Thread-safe.
class Reply {
 public:
  virtual ~Reply() = default;
  /// Sends the values that `fill` encodes. Must not send tensors on the loop thread.
  virtual void send(const std::function<void(Encoder&)>& fill) = 0;
  virtual void fail(base::Error error) = 0;
  /// Returns the place of the value that a remote() call creates here; null for other calls.
  virtual const std::shared_ptr<OwnedValue>& target() const = 0;
  /// Stores `value` as target(), then answers the call.
  void store(std::shared_ptr<void> value, std::type_index type, OwnedValue::EncodeFunction encode);
};
using ReplyPtr = std::shared_ptr<Reply>;
using Handler = std::function<void(CallContext&, Decoder&, const ReplyPtr&)>;

/// One rank of a job: calls functions on other ranks, and runs the functions that it exposes.
///
/// One process may have several agents. Functions exposed before join() can be called as soon as
/// another rank has joined. Thread-safe after join(). Functions run on a worker pool, which grows
/// while one of them waits, so nested and cyclic calls cannot deadlock. Errors are thrown as
/// base::Exception with the kind, message and rank of their origin. Calls are never retried.
class Agent {
 public:
  explicit Agent(AgentOptions options);
  /// Disconnects. Peers see this rank as lost unless shutdown() was called. If called on one of the
  /// agent's own threads, a new thread ends the agent. A join() that waits on another thread fails
  /// with `cancelled`. Need not run before the process exits.
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  /// Makes `F` callable under `name`. `F` is a function, member function or lambda without
  /// captures, with Serializable parameters and result. The agent sets a first parameter of type
  /// CallContext&. A function that returns a Future occupies no thread while it waits. A call
  /// starts with torch's default thread-local state and ends by restoring it. Callers name the same
  /// `F`, so a lambda must be a constant: `constexpr auto kTwice = [](int x) { return 2 * x; };`.
  template <auto F>
  void expose(const std::string& name);
  /// Lets remote_new() create objects of T. T::Constructor declares the constructor's parameters:
  /// `using Constructor = EmbeddingTable(int64_t rows, int64_t dim);`
  template <class T>
  void expose_class(const std::string& name);

  /// Stores `object` as the agent's only object of type T. Exposed functions get it by
  /// `context.agent.local<T>()`, which throws `not_found` if no T was provided.
  template <class T>
  void provide(std::shared_ptr<T> object) {
    provide_erased(typeid(T), std::move(object));
  }
  template <class T>
  T& local() const {
    return *static_cast<T*>(local_erased(typeid(T)));
  }
  /// Returns the provided T; if none, provides a new T(args...). Its constructor must not block.
  template <class T, class... Args>
  std::shared_ptr<T> shared(const Args&... args) {
    return std::static_pointer_cast<T>(
        shared_erased(typeid(T), [&] { return std::make_shared<T>(args...); }));
  }

  /// Replaces AgentOptions::device. Must not be called after `prepare` of join() has returned.
  void set_device(c10::Device device);
  c10::Device device() const;
  /// Returns the device of `rank`, such as "cuda:1", with its index on that rank. Waits for join().
  std::string device_of(int rank) const;

  /// Joins the job; returns when every rank accepts calls. Throws `rendezvous`, `auth`, … if this
  /// rank cannot join, and `invalid` if join() has been called before, even without success.
  /// `prepare` runs when job_options() are known, before any other rank can call this rank.
  /// `prepare` and the callbacks of AgentOptions may run until join() returns or throws.
  void join(const std::function<void()>& prepare = {});

  /// Calls F on `to` and waits for the result. This rank converts arguments to the types of F's
  /// parameters, without loss: passing a double for an integer does not compile, and an integer out
  /// of range throws `invalid`. Gradients flow through the call if it is made in an
  /// autograd::Context with gradients enabled. Otherwise tensors are sent without requires_grad, as
  /// in torch.distributed.rpc.
  template <auto F, class... Args>
  auto rpc_sync(const To& to, Args&&... args) -> typename FunctionTraits<F>::Result;
  /// Calls F on `to` and at once returns a Future of the result (Future<void> if F returns void).
  /// Tensor arguments are not copied, so do not write to them in place until the result arrives; if
  /// you must, pass `x.clone()`. (Optimizers of this rank do not write to parameters that are being
  /// sent.) Likewise, an exposed function must not write to a tensor that it has returned.
  template <auto F, class... Args>
  auto rpc_async(const To& to, Args&&... args);
  /// Calls F on `to`, keeps the result there and returns an RRef to it at once. Do not write to
  /// tensor arguments in place before to_here() or a call through the RRef has been answered.
  template <auto F, class... Args>
  auto remote(const To& to, Args&&... args) -> RRef<typename FunctionTraits<F>::Result>;
  /// Creates an object of class T on `to` and returns an RRef to it at once.
  template <class T, class... Args>
  RRef<T> remote_new(const To& to, Args&&... args);
  /// Moves `value` into an RRef that this rank owns.
  template <class T>
  RRef<T> make_rref(T value) {
    return make_rref(std::make_shared<T>(std::move(value)));
  }
  template <class T>
  RRef<T> make_rref(std::shared_ptr<T> value);

  /// Replaces AgentOptions::rpc_timeout for calls made from now on; max() means no timeout.
  void set_rpc_timeout(std::chrono::nanoseconds timeout);
  std::chrono::nanoseconds rpc_timeout() const;

  int rank() const;
  /// Returns true if rank 0 has admitted this rank, even if join() still waits. False on rank 0.
  bool is_admitted() const;
  int world_size() const;
  const std::string& name() const;
  /// Return information on a rank. Throw `not_found` if no rank has this name or number.
  WorkerInfo worker(const std::string& name) const;
  WorkerInfo worker(int rank) const;
  /// Returns the number of earlier processes of this rank in this job.
  uint32_t incarnation() const;
  /// Returns true unless the newest known process of `rank` is lost.
  bool is_here(int rank) const;
  /// Returns true if the rank is lost and the job continues without it.
  bool is_done_without(int rank) const;
  /// Returns the job options that rank 0 has sent. Valid after join().
  const std::map<std::string, std::string>& job_options() const;
  /// Returns the port that this rank listens on. On rank 0, valid before join().
  uint16_t port() const;
  /// Returns how this rank connects to the others: "unix", "tcp", "mixed", or "none" if alone.
  std::string transport() const;

  /// Serves calls until every rank has called shutdown() and the calls of functions that still run
  /// are answered, waits a few seconds at most until all ranks have released their RRefs and
  /// autograd contexts, then disconnects. Throws peer_lost if a rank is lost, `cancelled` after
  /// abort(). Must be called once, after this rank's last call.
  /// `on_waiting` gets the missing ranks every 5 s. `at_rest` runs when all ranks have called
  /// shutdown(). It may call other ranks, because they serve calls until it returns. If ranks are
  /// missing after `timeout`, aborts the job and throws `deadline`, which names them.
  void shutdown(std::function<void(const std::vector<int>& missing)> on_waiting = {},
                const std::function<void()>& at_rest = {},
                std::chrono::nanoseconds timeout = std::chrono::nanoseconds::max());
  /// Sends `error` to all other ranks as the reason, then disconnects. Operations that wait for
  /// other ranks fail, including shutdown(). If one of the agent's threads calls abort(), the
  /// destructor joins these threads.
  void abort(const base::Error& error);

  /// Called on rank 0, after all ranks have joined: lets the job continue when one of `ranks` is
  /// lost (peer_lost) or out of resources, as long as `least` of them remain. If fewer remain, the
  /// job ends, and `if_too_few` is appended to its error. If `may_return`, a new process can
  /// replace a lost rank. Returns when the setting is in effect.
  void go_on_without(const std::vector<int>& ranks, int least, const std::string& if_too_few,
                     bool may_return);
  /// Called on rank 0 when the new process of a replaced rank has done useful work. Until then the
  /// job continues after any failure of that process.
  void note_of_use(int rank);

  /// Return the numbers of this rank's RRefs and autograd contexts: 0 after a clean shutdown.
  size_t live_rrefs() const;
  size_t live_contexts() const;
  Traffic traffic() const;
  /// Returns this agent's counts for debugging: `calls.made`, `calls.waiting` (for a reply),
  /// `bytes.in`, `bytes.out`, `threads` (AgentOptions::worker_threads), `contexts`, `passes`
  /// (backward passes with work left on this rank), `rrefs.owned`, `rrefs.shared` (owned, and held
  /// by other ranks), `rrefs.used` (of other ranks' values), `rrefs.pending` (sent, not confirmed).
  std::map<std::string, uint64_t> info() const;
  const std::shared_ptr<base::Tracer>& tracer() const;

  /// Returns the operations in which this rank now waits for others (replies, collectives, join(),
  /// …), the longest wait first, to show where a program is stuck. Thread-safe at any time.
  std::vector<Wait> waits() const;

  /// Returns the worker pool. A continuation that runs there has the autograd context and torch's
  /// thread-local state of the thread that registered the continuation.
  base::Executor& executor();

  // ---- for the layers above ----

  /// Returns an executor that runs a continuation on the thread that completes its future, which is
  /// often the loop thread.
  base::Executor& inline_executor();

  /// Returns the loop for base::Promise: a thread that polls for a promise's value runs this loop.
  base::EventLoopPtr event_loop() const;

  /// Polls for `done`, and meanwhile runs on this thread the calls of the raw function `function`
  /// whose body begins with `key`, if this thread itself receives them. Returns after a short time,
  /// or at once on an accelerator, even if `done` is still pending.
  void run_calls_until(const base::Future<void>& done, std::string_view function, uint64_t key);

  /// Notifies `layer` of lost ranks, including those lost already, as long as the layer exists.
  void add_layer(const std::weak_ptr<Layer>& layer);

  /// Returns the channel of this number for one-way messages. The other ranks must open the same
  /// number: 1 is for autograd, 16 and above are for jobs.
  Channel& open_channel(uint16_t number);
  void set_autograd_hook(std::shared_ptr<AutogradHook> hook);
  const std::shared_ptr<AutogradHook>& autograd_hook() const;
  void expose_raw(const std::string& name, Handler handler);
  /// Calls `function` with arguments that `fill` encodes. If set, `target` gets the result.
  base::Future<RawReply> call_raw(const To& to, const std::string& function,
                                  const std::function<void(Encoder&)>& fill,
                                  const std::shared_ptr<RRefHandle>& target = nullptr,
                                  CallForm form = CallForm::kAsync);
  /// Decodes a reply, and records its receive node for autograd. Must not run on the loop, except
  /// for a plain reply.
  std::shared_ptr<InMessage> open(const RawReply& reply);
  /// Returns the single value of a reply. Must not run on the loop if the reply has tensors.
  template <class R>
  R finish(const RawReply& reply);
  AgentCore& core() { return *core_; }
  /// Returns a reference to this agent that is valid as long as the agent's threads run, even if
  /// one of them has destroyed this object.
  Agent& lasting();

 private:
  template <class T>
  friend class RRef;
  friend class AgentCore;
  explicit Agent(AgentCore& core);  // creates AgentCore::agent, which does not end the core
  template <class R>
  base::Future<R> finish_async(const base::Future<RawReply>& reply);
  template <auto F, class... Args>
  base::Future<RawReply> call(const To& to, const std::shared_ptr<RRefHandle>& target,
                              CallForm form, Args&&... args);
  void expose_tag(const void* tag, const std::string& name, Handler handler);
  const std::string& name_of(const void* tag, const char* what) const;
  void provide_erased(std::type_index type, std::shared_ptr<void> object);
  void* local_erased(std::type_index type) const;
  std::shared_ptr<void> shared_erased(std::type_index type,
                                      const std::function<std::shared_ptr<void>()>& make);
  int rank_of(const To& to) const;
  std::shared_ptr<RRefHandle> new_handle(int owner);

  std::shared_ptr<AgentCore> core_;
};

}  // namespace distrain::rpc

#include "distrain/rpc/agent_impl.h"
