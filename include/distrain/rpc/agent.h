#pragma once

#include <map>

#include "distrain/base/future.h"
#include "distrain/base/trace.h"
#include "distrain/membership/options.h"
#include "distrain/rpc/autograd_hook.h"
#include "distrain/rpc/channel.h"
#include "distrain/rpc/device.h"
#include "distrain/rpc/function_traits.h"
#include "distrain/rpc/rref.h"
#include "distrain/rpc/serialize.h"

namespace distrain::rpc {

class AgentCore;

/// Maps devices of this rank to the devices of `peer` on which their tensors arrive, one to one,
/// because replies and gradients use the map in reverse. CPU tensors arrive on the CPU.
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
  /// This rank's device, current on the thread of join() and the agent's threads. Its default index
  /// is the rank modulo the number of devices. Its tensors arrive on the receiving rank's device,
  /// which must be an accelerator too. Sending tensors of other devices needs a map; without a map
  /// it throws `invalid`, because nothing is copied to the CPU implicitly.
  c10::Device device = c10::kCPU;
  std::vector<DeviceMap> device_maps;
  /// Fault injection: delays each call to another rank.
  std::chrono::nanoseconds call_delay{0};
  /// Records this rank's trace after the tracer is started. Null on all ranks or on none.
  std::shared_ptr<base::Tracer> tracer;
  /// Limits the bytes of received calls that have not begun: `peer_budget` for each rank, and
  /// `total_budget` (at least 32 KiB per rank) for all ranks, half of it reserved in equal shares.
  /// `total_budget` also limits, separately, the bytes of begun calls without an answer. At a
  /// limit, callers wait, and fail with `overloaded` at their deadline. One call may exceed it.
  uint64_t peer_budget = uint64_t{256} << 20;
  uint64_t total_budget = uint64_t{1} << 30;
  int worker_threads = 4;  ///< not counting threads that wait for a reply
};

/// A component that is built on an agent and keeps state about other ranks, such as autograd
/// contexts or operations that wait for a rank. Registered with Agent::add_layer().
class Layer {
 public:
  virtual ~Layer() = default;
  /// Called once for each lost process of another rank, before any call from its next process runs.
  /// When this agent ends, called for each remaining rank, with `cancelled`. Releases the rank's
  /// state and fails waits for it with `loss.error`. Must be quick: one thread calls all layers.
  virtual void on_rank_lost(const Loss& loss) = 0;
  /// Called by Agent::shutdown() when all calls of this rank are answered. May call other ranks.
  virtual void on_shutdown() {}
  /// Returns this layer's waits, for Agent::waits(). Runs on any thread; must not block or throw.
  virtual std::vector<Wait> waits() const { return {}; }
};

struct WorkerInfo {
  int rank = -1;
  std::string name;
  uint32_t incarnation = 0;  ///< number of earlier processes of this rank: Note [Incarnations]
};

/// The rank, or the name of the rank, to which a call goes, and the call's timeout.
class To {
 public:
  To(int rank) : rank_(rank) {}                         // NOLINT: implicit by design
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
  class Agent& agent;  ///< Agent::lasting()
  WorkerInfo caller;
};

struct Traffic {
  uint64_t calls = 0;  ///< calls that this rank has made
  uint64_t bytes_out = 0;
  uint64_t bytes_in = 0;
};

/// A received reply that is not decoded yet.
struct RawReply {
  std::shared_ptr<InMessage> message;             ///< if this rank called itself
  net::InFrame frame;                             ///< otherwise
  std::shared_ptr<DeviceReceive> device_receive;  ///< of its tensors; null: none on devices
  int from = -1;
  uint64_t context = 0;
  uint64_t sent = 0;  ///< autograd id of the call's arguments, in `context`
  std::string function;
  /// Releases the contents if the reply is never opened. Null if there is nothing to release.
  std::shared_ptr<class UnopenedReply> unopened;

  /// Marks the reply as opened. Returns false if it was already opened or given up.
  bool open() const;
  /// Unless the reply was opened, releases its contents and gives up the call.
  void give_up() const;
};

/// Answers one call, on the rank that runs the function. Only the first answer counts. Destroying
/// an unused reply answers `cancelled`. May outlive the agent. Thread-safe.
class Reply {
 public:
  virtual ~Reply() = default;
  /// Sends the values that `fill` encodes. Must not send tensors on the loop thread.
  virtual void send(const std::function<void(Encoder&)>& fill) = 0;
  virtual void fail(base::Error error) = 0;
  /// Returns the value that a remote() call creates on this rank; null for other calls.
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

  /// Makes `F` callable under `name`: a function, member function or lambda without captures, with
  /// Serializable parameters and result. The agent sets a first parameter of type CallContext&. A
  /// function that returns a Future occupies no thread while it waits. Callers use the same `F`, so
  /// a lambda must be a constant: `constexpr auto kTwice = [](int x) { return 2 * x; };`. The call
  /// starts with torch's default thread-local state, and its changes to that state end with it.
  template <auto F>
  void expose(const std::string& name);
  /// Lets remote_new() create objects of T. T::Constructor declares the constructor's parameters:
  /// `using Constructor = EmbeddingTable(int64_t rows, int64_t dim);`
  template <class T>
  void expose_class(const std::string& name);

  /// Stores the agent's object of type T. Exposed functions get it by `context.agent.local<T>()`,
  /// which throws `not_found` if no T was provided.
  template <class T>
  void provide(std::shared_ptr<T> object) {
    provide_erased(typeid(T), std::move(object));
  }
  template <class T>
  T& local() const {
    return *static_cast<T*>(local_erased(typeid(T)));
  }
  /// Returns the provided T, or creates and provides a T. The constructor must not block.
  template <class T, class... Args>
  std::shared_ptr<T> shared(const Args&... args) {
    return std::static_pointer_cast<T>(
        shared_erased(typeid(T), [&] { return std::make_shared<T>(args...); }));
  }

  /// Replaces AgentOptions::device. Must not be called after `prepare` of join() has returned.
  void set_device(c10::Device device);
  c10::Device device() const;
  /// Returns the device of any rank, with that rank's device index. Waits for join().
  std::string device_of(int rank) const;

  /// Joins the job; returns when every rank accepts calls. Throws `rendezvous`, `auth`, … if this
  /// rank cannot join, and `invalid` if join() has been called before, even without success.
  /// `prepare` runs when job_options() are known, before any other rank can call this rank.
  void join(const std::function<void()>& prepare = {});

  /// Calls F on `to` and waits for the result. Arguments are converted to F's parameter types here,
  /// without loss: a double for an integer does not compile, an integer out of range throws
  /// `invalid`. Gradients flow through the call if it is made in an autograd::Context, with
  /// gradients enabled. Otherwise tensors are sent without requires_grad, as in
  /// torch.distributed.rpc.
  template <auto F, class... Args>
  auto rpc_sync(const To& to, Args&&... args) -> typename FunctionTraits<F>::Result;
  /// Calls F on `to` and at once returns a Future of the result (Future<void> if F returns void).
  /// Tensor arguments are not copied: until the result arrives, do not write to them in place, or
  /// pass `x.clone()`. (Optimizers of this rank do not write to parameters that are being sent.)
  /// Nor may an exposed function write to a tensor that it has returned.
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

  int rank() const;
  /// Returns true if rank 0 has admitted this rank, even if join() still waits. False on rank 0.
  bool is_admitted() const;
  int world_size() const;
  const std::string& name() const;
  /// Return information on a rank. Throw `not_found`, with a list of the ranks, if none matches.
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
  /// Returns how the peers are connected: "unix", "tcp", "mixed" or "none".
  std::string transport() const;

  /// Serves calls until every rank has called shutdown(), waits until all ranks have released their
  /// RRefs and autograd contexts, then disconnects. Throws peer_lost if a rank is lost, `cancelled`
  /// after abort(). Must be called once; no call may follow. `on_waiting` gets the missing ranks,
  /// like AgentOptions::on_waiting. `at_rest` runs when all ranks have called shutdown(); it may
  /// call other ranks, because they wait until it returns.
  void shutdown(std::function<void(const std::vector<int>& missing)> on_waiting = {},
                const std::function<void()>& at_rest = {});
  /// Sends `error` to all peers as the reason, then disconnects. All waits for other ranks fail,
  /// including shutdown(). If one of the agent's threads calls abort(), the destructor joins them.
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
  const std::shared_ptr<base::Tracer>& tracer() const;

  /// Returns what this rank waits for now (replies, collectives, ranks that join or end, …), the
  /// longest wait first, to report a stuck program. Thread-safe at any time.
  std::vector<Wait> waits() const;

  /// Returns the worker pool. A continuation that runs there has the autograd context and torch's
  /// thread-local state of the thread that registered the continuation.
  base::Executor& executor();

  // ---- for the layers above ----

  /// Returns an executor that runs continuations where their future completes, often on the loop.
  base::Executor& inline_executor();

  /// Notifies `layer` of lost ranks, including earlier ones, as long as the layer exists.
  void add_layer(const std::weak_ptr<Layer>& layer);

  /// Opens a channel for one-way messages. Autograd uses number 1, jobs use numbers from 16 on.
  Channel& open_channel(uint16_t number);
  void set_autograd_hook(std::shared_ptr<AutogradHook> hook);
  const std::shared_ptr<AutogradHook>& autograd_hook() const;
  void expose_raw(const std::string& name, Handler handler);
  /// Calls `function` with the arguments that `fill` encodes. The result becomes `target`, if set.
  base::Future<RawReply> call_raw(const To& to, const std::string& function,
                                  const std::function<void(Encoder&)>& fill,
                                  const std::shared_ptr<RRefHandle>& target = nullptr);
  /// Decodes a reply, and records its receive node for autograd. Must not run on the loop.
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
  explicit Agent(AgentCore& core);  // the core's own handle, which does not end the core
  template <class R>
  base::Future<R> finish_async(const base::Future<RawReply>& reply);
  template <auto F, class... Args>
  base::Future<RawReply> call(const To& to, const std::shared_ptr<RRefHandle>& target,
                              Args&&... args);
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
