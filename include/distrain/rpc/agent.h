#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/base/trace.h"
#include "distrain/net/port_range.h"
#include "distrain/rpc/autograd_hook.h"
#include "distrain/rpc/channel.h"
#include "distrain/rpc/device.h"
#include "distrain/rpc/function_traits.h"
#include "distrain/rpc/layer.h"
#include "distrain/rpc/rref.h"
#include "distrain/rpc/serialize.h"

namespace distrain::rpc {

class AgentCore;

/// Where tensors on devices of this rank arrive on another one: own device, the peer's. One to one;
/// replies and gradients go the same way back. CPU tensors arrive on the CPU.
struct DeviceMap {
  std::string peer;  ///< a rank's name
  std::vector<std::pair<c10::Device, c10::Device>> devices;
};

/// Errors and warnings name the options of the command: `--master-port` is `master_port` here,
/// `--listen` is `listen_addr`, `--token-file` a file that holds the `token`, and so on.
struct AgentOptions {
  int rank = 0;  ///< not any: a Place says which
  /// Rank 0: names of all ranks, so also how many there are. Others take theirs from rank 0.
  std::vector<std::string> names;
  int world_size = 0;            ///< others: refused if rank 0 has another; 0: follow rank 0
  std::string job = "distrain";  ///< ranks of another one are refused
  std::string master_addr = "localhost";  ///< where rank 0 listens
  uint16_t master_port = 0;               ///< rank 0 only: 0 takes any free one
  int listen_fd = -1;                     ///< rank 0: a socket that listens already
  std::string listen_addr;  ///< to bind; empty: what master_addr is, or the interface towards it
  /// All ranks are on this host, and meet at rank 0's unix socket of this name: nobody listens on
  /// TCP. Rank 0's `listen_fd` is that socket.
  std::string rank_0_unix_name;
  /// Name of the unix socket at which ranks on rank 0's host, of the same user, try to join before
  /// they use TCP (see rpc/meeting.h). Unused if `transport` is tcp. If empty, the name is derived
  /// from job_id, master_addr and the port.
  std::string meeting_name;
  net::PortRange ports;            ///< to listen on; rank 0: where no master_port is given
  std::string transport = "auto";  ///< auto (unix on the same host), tcp, unix
  /// What all ranks of the job know and nobody else; whoever connects proves it. Empty: ranks
  /// believe processes of this user on this host, and with `insecure` anybody.
  std::string token;
  bool insecure = false;
  /// Tells this job from others at the same address. Empty: rank 0 makes one for all.
  std::string job_id;
  /// How often the job was restarted: ranks of other generations are refused. None: rank 0's (0).
  std::optional<uint32_t> generation;
  /// The job is being started again, and this rank may be sooner than rank 0: while that has no
  /// place for it, it is asked again, until the join timeout.
  bool rejoins = false;
  /// Called when a process that claims to be rank `why.rank` is refused; `why` says what its user
  /// is to do; once for each rank and reason. On the loop thread: must not block.
  std::function<void(const base::Error& why)> on_refused;
  /// A collective, or an update that several ranks make together, waits for other ranks for longer
  /// than `long_wait`: told once for each such wait. On the loop thread: not to block.
  std::function<void(const Wait& wait)> on_long_wait;
  std::chrono::nanoseconds long_wait = std::chrono::seconds(30);
  std::chrono::nanoseconds rpc_timeout = std::chrono::seconds(60);
  std::chrono::nanoseconds join_timeout = std::chrono::seconds(300);
  /// A peer that is silent for so long is lost; zero: only a closed connection tells.
  std::chrono::nanoseconds peer_timeout = std::chrono::seconds(5);
  /// This rank's device, if it has one: tensors on it arrive on the device of the rank that they
  /// are sent to, which is then an accelerator, too. Others need a map; a tensor on a device that
  /// has no way to its receiver is `invalid`. Nothing is ever copied to the CPU unasked. Without an
  /// index it is the rank's own: its number modulo the number of devices that this process sees, as
  /// torch.distributed takes it. It becomes the current device of join()'s thread and the agent's.
  c10::Device device = c10::kCPU;
  std::vector<DeviceMap> device_maps;
  /// Fault injection: each call that this agent makes is sent so much later.
  std::chrono::nanoseconds call_delay{0};
  /// Records what this rank does, once started; null: nothing. On all ranks or on none.
  std::shared_ptr<base::Tracer> tracer;
  /// Bytes of calls that may wait here to be run: of one other rank, and of all together. Who sends
  /// more waits, and fails with `overloaded` when the call's time is over. The same goes for calls
  /// that have begun, of all ranks, and are not answered yet; one call may be as large as it likes.
  /// Replies that a rank does not read hold its next calls up. All ranks together may always send
  /// half of the total, in equal parts; it is raised to 32 KiB for each rank.
  uint64_t peer_budget = uint64_t{256} << 20;
  uint64_t total_budget = uint64_t{1} << 30;
  int worker_threads = 4;  ///< that may run; threads that wait for a reply do not count
  /// Rank 0: the job's options, given to all. Others: those that must agree with rank 0's.
  std::map<std::string, std::string> job_options;
  /// Called on the joining thread once all ranks are known, before any other rank can call this
  /// one: how many ranks, this one included, share this one's CPUs.
  std::function<void(int ranks)> on_cpus_shared;
  /// Called every 5 s on the joining thread while join() waits, which is silent without it; see
  /// examples/runtime.cpp. `missing`: on rank 0 the ranks that have not joined or are not ready; on
  /// others rank 0, which alone knows them. `address`: of rank 0. `reason`: why ranks were refused,
  /// or why this rank cannot join rank 0; may be empty.
  std::function<void(const std::vector<int>& missing, const std::string& address,
                     const std::string& reason)>
      on_waiting;
};

struct WorkerInfo {
  int rank = -1;
  std::string name;
  uint32_t incarnation = 0;  ///< processes that have had the rank before: Note [Incarnations]
};

/// Whom a call goes to, by rank or name, and how long it may take.
class To {
 public:
  To(int rank) : rank_(rank) {}                         // NOLINT: implicit by design
  To(const char* name) : name_(name) {}                 // NOLINT
  To(std::string name) : name_(std::move(name)) {}      // NOLINT
  To(const WorkerInfo& worker) : rank_(worker.rank) {}  // NOLINT

  /// Instead of the agent's rpc_timeout.
  To& timeout(std::chrono::nanoseconds limit) {
    timeout_ = limit;
    return *this;
  }
  /// The call lives as long as its peer: for calls as long as the job.
  To& without_deadline() { return timeout(std::chrono::nanoseconds::max()); }

 private:
  friend class Agent;
  int rank_ = -1;
  std::string name_;
  std::chrono::nanoseconds timeout_ = kAgentsTimeout;
};

/// Given to an exposed function that asks for it as its first parameter.
struct CallContext {
  class Agent& agent;  ///< Agent::lasting()
  WorkerInfo caller;
};

struct Traffic {
  uint64_t calls = 0;  ///< made by this rank
  uint64_t bytes_out = 0;
  uint64_t bytes_in = 0;
};

/// A reply as it came from the network, not looked at yet.
struct RawReply {
  std::shared_ptr<InMessage> message;  ///< a call to oneself
  net::InFrame frame;                  ///< otherwise
  std::shared_ptr<Arrivals> arrivals;  ///< of its tensors; null: it has none on devices
  int from = -1;
  uint64_t context = 0;
  uint64_t sent = 0;  ///< in the context, the pair of autograd nodes of the call's arguments
  std::string function;
  /// Until it is opened or given up, at the latest with its last copy. Null: nothing is to be done.
  std::shared_ptr<class UnopenedReply> unopened;

  /// Opens it for this thread. False if it was opened or given up before.
  bool open() const;
  /// What it brings is let go, and its call counts as given up, unless it has been opened.
  void give_up() const;
};

/// The answer to one call, on the rank that runs the function. Whoever completes it first wins; one
/// that is never completed answers `cancelled`. May outlive the agent. Thread-safe.
class Reply {
 public:
  virtual ~Reply() = default;
  /// Sends what `fill` encodes. On the loop thread only if that has no tensors.
  virtual void send(const std::function<void(Encoder&)>& fill) = 0;
  virtual void fail(base::Error error) = 0;
  /// The value that a remote() call is to make here; null for other calls.
  virtual const std::shared_ptr<OwnedValue>& target() const = 0;
  /// Stores `value` as the target, then answers.
  void store(std::shared_ptr<void> value, std::type_index type, OwnedValue::EncodeFunction encode);
};
using ReplyPtr = std::shared_ptr<Reply>;
using Handler = std::function<void(CallContext&, Decoder&, const ReplyPtr&)>;

/// One rank of a job: it calls functions on other ranks, and runs those that it exposes for them.
///
/// An object, not a singleton: several live in one process. Everything exposed before join() can be
/// called from the first moment on. Thread-safe after join(). Functions run on a worker pool, which
/// grows while one of them waits, so nested and cyclic calls cannot deadlock. Errors are thrown as
/// base::Exception with the kind, text and rank of where they happened. No call is ever retried.
class Agent {
 public:
  explicit Agent(AgentOptions options);
  /// Without shutdown() first, peers see this rank as lost. On one of the agent's own threads, as
  /// in a continuation that held the last pointer to it, the agent ends on another thread soon
  /// after. An agent that lives until the process exits does no harm.
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  /// Makes `F` callable under `name`: a function, a member function or a lambda without captures,
  /// with parameters and result that are Serializable (a result may also be a Future of that, and
  /// then holds no thread while it is not there). A first parameter CallContext& is filled in here.
  /// Callers name the same `F`, so a lambda is a constant of both: `constexpr auto kTwice = [](int
  /// x) { return 2 * x; };`. `F` starts with torch's default thread-local state, and what it
  /// changes of that (GradMode, autocast, at::set_num_threads) ends with it.
  template <auto F>
  void expose(const std::string& name);
  /// Makes objects of T creatable by remote_new. T::Constructor names the constructor's parameters:
  /// `using Constructor = EmbeddingTable(int64_t rows, int64_t dim);`
  template <class T>
  void expose_class(const std::string& name);

  /// Gives exposed functions something of this rank to work on: one object for each type, found by
  /// `context.agent.local<T>()`. `not_found` where none was given.
  template <class T>
  void provide(std::shared_ptr<T> object) {
    provide_erased(typeid(T), std::move(object));
  }
  template <class T>
  T& local() const {
    return *static_cast<T*>(local_erased(typeid(T)));
  }
  /// What this rank was provided with, or, the first time, a T that is made of `args` for all who
  /// ask for one. To make it must wait for nobody.
  template <class T, class... Args>
  std::shared_ptr<T> shared(const Args&... args) {
    return std::static_pointer_cast<T>(
        shared_erased(typeid(T), [&] { return std::make_shared<T>(args...); }));
  }

  /// In place of AgentOptions::device; at the latest in the `prepare` of join().
  void set_device(c10::Device device);
  c10::Device device() const;
  /// That of any rank, as that one numbers it; after join().
  std::string device_of(int rank) const;

  /// Meets the other ranks; returns when all are connected to all. Throws rendezvous, protocol, ….
  /// `prepare` runs once job_options() are known, before any other rank can call this one. Throws
  /// `invalid` if it has been called before, whether or not that call joined.
  void join(const std::function<void()>& prepare = {});

  /// Calls F on `to` and waits for the result. Arguments are converted to F's parameter types,
  /// here, implicitly and without loss: a double for an integer does not compile, an integer out of
  /// range is `invalid`. Gradients flow through a call in an autograd::Context only; outside of
  /// one, or under a NoGradGuard or InferenceMode of the caller, a tensor travels as a value and
  /// its `requires_grad` stays behind, as in torch.distributed.rpc.
  template <auto F, class... Args>
  auto rpc_sync(const To& to, Args&&... args) -> typename FunctionTraits<F>::Result;
  /// The same without waiting: a Future of F's result (Future<void> if it has none). Tensors among
  /// the arguments are not copied: they are read until the result is there, so do not write to them
  /// in place before, or pass `x.clone()`. (Parameters that an optimizer of this rank updates are
  /// held as they are.) The same goes for a tensor that an exposed function returns and keeps.
  template <auto F, class... Args>
  auto rpc_async(const To& to, Args&&... args);
  /// Calls F on `to` and leaves the result there: an RRef to it, at once. Tensors among the
  /// arguments are read as by rpc_async(), until the value has been made there: to_here(), or a
  /// call through the RRef that has its answer, tells that.
  template <auto F, class... Args>
  auto remote(const To& to, Args&&... args) -> RRef<typename FunctionTraits<F>::Result>;
  /// Makes a T on `to`.
  template <class T, class... Args>
  RRef<T> remote_new(const To& to, Args&&... args);
  /// Makes a value of this rank shareable.
  template <class T>
  RRef<T> make_rref(T value) {
    return make_rref(std::make_shared<T>(std::move(value)));
  }
  template <class T>
  RRef<T> make_rref(std::shared_ptr<T> value);

  int rank() const;
  /// Rank 0 has let this rank in; it may still wait for others. Not of rank 0.
  bool has_place() const;
  int world_size() const;
  const std::string& name() const;
  /// `not_found` naming the ranks there are.
  WorkerInfo worker(const std::string& name) const;
  WorkerInfo worker(int rank) const;
  /// The number of this process among those that have had its rank in this job, from 0.
  uint32_t incarnation() const;
  /// Whether the rank's newest process is not lost, as far as this one knows.
  bool is_here(int rank) const;
  /// It is not, and the job goes on without it.
  bool is_done_without(int rank) const;
  /// Rank 0's options, after join().
  const std::map<std::string, std::string>& job_options() const;
  /// The port of rank 0's socket; known as soon as its agent exists.
  uint16_t port() const;
  /// "unix", "tcp", "mixed" or "none": how the peers are connected.
  std::string transport() const;

  /// Waits until every rank has come here, for as long as that takes, serving calls meanwhile; then
  /// until references and contexts are released everywhere; then disconnects. Throws peer_lost if a
  /// rank dies instead. Nothing may be called afterwards. `on_waiting` as in AgentOptions, with the
  /// ranks that have not come yet. `at_rest` is run when all have come: the last moment to call
  /// others, which wait for it. Once, and not behind abort(): that is `cancelled`.
  void shutdown(std::function<void(const std::vector<int>& missing)> on_waiting = {},
                const std::function<void()>& at_rest = {});
  /// Tells all peers why this rank leaves, and disconnects: what waits for others fails here, a
  /// shutdown() on another thread too. In a function of the agent, the destructor does the rest.
  void abort(const base::Error& error);

  /// On rank 0, once all have joined: from now on the job goes on without those of `ranks` that are
  /// gone (peer_lost), or have run out of something (resources), as long as `least` of them are
  /// left; where they are not, `if_too_few` is said of the last loss. While `may_return`, a new
  /// process can join in the place of one that is lost. Returns when that holds.
  void go_on_without(const std::vector<int>& ranks, int least, const std::string& if_too_few,
                     bool may_return);
  /// A rank that has come in the midst of the job does its part: before that, whatever it fails
  /// with is a loss that the job goes on from.
  void note_of_use(int rank);

  /// RRefs this rank owns or holds, and autograd contexts it knows: 0 after a clean shutdown.
  size_t live_rrefs() const;
  size_t live_contexts() const;
  Traffic traffic() const;
  const std::shared_ptr<base::Tracer>& tracer() const;

  /// What this rank waits for now: answers of other ranks, collectives, updates that are yet to be
  /// whole, ranks that are to join or to end; the longest waits first. Any thread, at any time: for
  /// a program that is stuck, from a thread that waits for SIGQUIT, say.
  std::vector<Wait> waits() const;

  /// The worker pool; continuations registered through it keep the autograd context and torch's
  /// thread-local state of where they were registered.
  base::Executor& executor();

  // ---- for the layers above ----

  /// Runs continuations on the thread that completes the future, often the loop's.
  base::Executor& inline_executor();

  /// From now on it hears who is lost, those that were before included, for as long as it lives.
  void add_layer(const std::weak_ptr<Layer>& layer);

  /// The lane `number` for one-way messages: 1 autograd, 2 collectives, from 16 on jobs.
  Channel& open_channel(uint16_t number);
  void set_autograd_hook(std::shared_ptr<AutogradHook> hook);
  const std::shared_ptr<AutogradHook>& autograd_hook() const;
  void expose_raw(const std::string& name, Handler handler);
  /// `fill` writes the arguments. With `target`, a remote() call that makes it.
  base::Future<RawReply> call_raw(const To& to, const std::string& function,
                                  const std::function<void(Encoder&)>& fill,
                                  const std::shared_ptr<RRefHandle>& target = nullptr);
  /// Makes a message of a reply, with its autograd node. Not on the loop.
  std::shared_ptr<InMessage> open(const RawReply& reply);
  AgentCore& core() { return *core_; }
  /// Returns a handle of this agent that is valid for as long as its threads run anything. That is
  /// longer than this object lives if it is destroyed on one of them.
  Agent& lasting();

 private:
  template <class T>
  friend class RRef;
  friend class AgentCore;
  explicit Agent(AgentCore& core);  // its own handle, which does not end it
  template <class R>
  base::Future<R> finish_async(const base::Future<RawReply>& reply);
  template <class R>
  R finish(const RawReply& reply);
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
  std::shared_ptr<RRefHandle> new_remote_handle(int owner);
  std::shared_ptr<RRefHandle> new_local_handle();

  std::shared_ptr<AgentCore> core_;
};

}  // namespace distrain::rpc

#include "distrain/rpc/agent_impl.h"
