#pragma once

#include <shared_mutex>
#include <thread>
#include <typeindex>

#include "call/call_queue.h"
#include "call/calls.h"
#include "device/device_table.h"
#include "distrain/base/thread_pool.h"
#include "flow/credit.h"
#include "layers.h"
#include "peers.h"
#include "rref/rref_context.h"

namespace distrain::rpc {

class ChannelImpl;

using base::Error;
using base::ErrorKind;
using base::Exception;

/// The worker pool. A continuation runs with the autograd context and torch's thread-local state of
/// the thread that registered it. Each task starts with the rank's device as current device. A
/// stopped pool drops tasks.
class WorkerExecutor final : public base::Executor {
 public:
  explicit WorkerExecutor(base::ThreadPool::Options options)
      : pool_([&] {
          options.before_task = [this] { enter_device(); };
          return std::move(options);
        }()) {}
  base::ThreadPool& pool() { return pool_; }
  void set_device(c10::Device device) {
    index_ = device.index();
    type_ = device.type();
  }
  /// Makes the rank's device current on this thread, even if it is not a worker.
  void enter_device() const noexcept { make_current({type_, index_}); }
  void post(base::Task task) override { post_behind(base::queued_work(), std::move(task)); }
  void post_behind(base::QueuedWorkPtr work, base::Task task) override {
    pool_.post(base::behind(std::move(work), std::move(task)));
  }
  base::Task bind(base::Task task) override;
  Error error_in_flight(ErrorKind otherwise) const override {
    return rpc::error_in_flight(otherwise);
  }

 private:
  std::atomic<c10::DeviceType> type_{c10::kCPU};
  std::atomic<c10::DeviceIndex> index_{-1};
  base::ThreadPool pool_;
};

/// Name of the function by which the caller of a failed remote() call fails the value on its owner.
inline constexpr char kFailFunction[] = "distrain.rref.fail";

/// Moves `call` to this thread's run_calls_until(), if that polls for such a call and holds none.
bool take_own_call(QueuedCall& call);

/// Gives replies, which may outlive the agent, access to it until it ends. Thread-safe.
class ReplyGate {
 public:
  explicit ReplyGate(AgentCore& core) : core_(&core) {}
  /// Calls `use(core)` unless the agent has ended. The agent cannot end during the call.
  template <class F>
  void enter(const F& use) {
    std::shared_lock lock(mutex_);
    if (core_) use(*core_);
  }
  /// Makes later enter() calls do nothing. Waits until no `use` is running.
  void close() {
    std::lock_guard lock(mutex_);
    core_ = nullptr;
  }

 private:
  std::shared_mutex mutex_;
  AgentCore* core_;
};

/// The implementation of Agent.
///
/// Threads: the loop receives frames. It only reads their headers, then finds the waiting call or
/// posts the work to the pool. The calling thread or the pool encodes, decodes and runs user
/// functions. Lock order: while a class holds its lock, it calls no other class that locks, except
/// Budget, SerialThread and the loop, which call no class that locks.
class AgentCore {
 public:
  explicit AgentCore(AgentOptions options);
  ~AgentCore() {
    close();
    hook = nullptr;  // released before the channels that it uses
  }

  void join(const std::function<void()>& prepare);
  void abort(const Error& error) {
    if (!closed_) control->abort(with_origin(error, options.rank, {}));
    close();
  }
  /// Ends the agent. If one of the agent's threads calls this, a later call joins the threads.
  void close();
  /// Returns true on the agent's own threads, which cannot wait for themselves to end.
  bool runs_here() const {
    return pool.runs_here() || layers.notifies_here() || given_up_.runs_here() || loop.in_loop();
  }

  base::Future<RawReply> call(int to, base::Duration timeout, const std::string& function,
                              const std::function<void(Encoder&)>& fill,
                              const std::shared_ptr<RRefHandle>& target,
                              CallForm form = CallForm::kAsync);
  std::shared_ptr<InMessage> open(const RawReply& reply);
  /// Releases the contents of a reply that will never be opened.
  void release(RawReply reply);
  /// Sends the reply to the call `call_id` that rank `to` has made.
  void send_reply(int to, uint64_t call_id, uint64_t context,
                  const std::function<void(Encoder&)>& fill);
  void send_error(int to, uint64_t call_id, Error error);
  /// Sends each grant of credit to its rank. Grants to this rank go to its own window.
  void send_grants(bool is_small, const Budget::Grants& grants);

  void set_device(c10::Device device) {
    devices.set_home(device);
    enter_device();
  }
  /// Makes the rank's device current on this thread and, in later tasks, on the agent's threads.
  void enter_device() {
    executor.set_device(devices.home());
    executor.enter_device();
  }
  void run_calls_until(const base::Future<void>& done, std::string_view function, uint64_t key);
  /// Writes or queues a frame. Returns the error of a lost rank, or `peer_lost` if `to` has left.
  base::Status send(int to, net::OutFrame frame) {
    bytes_out_.fetch_add(wire::kHeaderBytes + bytes_of(frame), std::memory_order_relaxed);
    return peers.send(to, std::move(frame));
  }
  ChannelImpl& open_channel(uint16_t number);

  Agent agent{*this};
  AgentOptions options;
  std::atomic<std::chrono::nanoseconds> rpc_timeout{options.rpc_timeout};
  DeviceTable devices;
  DeviceStager stager;
  // Shared, because continuations of futures may use the executors after the agent's end.
  const std::shared_ptr<WorkerExecutor> shared_executor;
  const std::shared_ptr<base::InlineExecutor> inline_executor =
      std::make_shared<base::InlineExecutor>();
  WorkerExecutor& executor = *shared_executor;
  base::ThreadPool& pool = executor.pool();
  const std::shared_ptr<ReplyGate> replies = std::make_shared<ReplyGate>(*this);
  Layers layers{[executor = shared_executor] { executor->enter_device(); }};
  PendingCalls pending;
  /// Credit for calls to this rank, and for calls to each rank, this rank included.
  struct Flow {
    std::unique_ptr<Budget> budget;
    PerRank<Window> windows;
  };
  // [0] is for all calls, [1] for small calls alone. Created when the ranks are known.
  std::array<Flow, 2> flows;
  std::atomic<uint64_t> early_messages{0};  // bytes of messages for channels without a handler
  std::shared_ptr<RRefContext> rrefs;
  std::shared_ptr<AutogradHook> hook;
  std::string name;
  // Exposed functions by name, and the names that calls look up by tag (see expose_tag()).
  mutable std::shared_mutex registry_mutex;
  std::unordered_map<std::string, Handler> handlers;
  std::unordered_map<const void*, std::string> names;
  std::unordered_map<std::type_index, std::shared_ptr<void>> provided;
  std::mutex making_mutex;  // serializes Agent::shared()

  const std::shared_ptr<membership::ControlPlane> control;
  Peers peers;
  std::map<std::string, std::string> job_options;

  int world_size() const { return peers.size(); }
  /// Returns false if the credit window for `rank` has failed, so calls to `rank` fail. Differs
  /// from is_here() for a moment when a lost rank returns, because its new window is created last.
  bool has_window(int rank) const {
    return rank == options.rank || rank >= known_windows() ||
           !flows[0].windows.at(rank).has_failed();
  }
  /// Returns true if `process` is the newest of its rank and not lost, or is this process.
  bool is_here(ProcessNumber process) const {
    return rank_of(process) == options.rank || peers.is_here(process);
  }
  uint32_t incarnation() const { return incarnation_; }
  Traffic traffic() const { return {calls_.load(), bytes_out_.load(), bytes_in_.load()}; }
  std::vector<Wait> waits();
  /// Return the current counts. After close(), return the counts when close() began, to show leaks.
  size_t live_rrefs() const { return closed_ ? last_live_rrefs_.load() : rrefs->live(); }
  size_t live_contexts() const {
    return closed_ ? last_live_contexts_.load() : hook ? hook->live_contexts() : 0;
  }

 private:
  void send_failure_to_owner(const std::shared_ptr<RRefHandle>& target, const Error& error,
                             bool was_sent);
  base::Status send_from_device(int to, DeviceSend& device_send,
                                const DeviceSend::StillWanted& still_wanted = {});
  /// A message that has been encoded but not sent.
  struct OutgoingMessage {
    wire::FrameHeader header;
    std::vector<RRefTicket> tickets;
    // Exactly one of these three members is set.
    std::shared_ptr<InMessage> own;           // a message to this rank itself
    std::shared_ptr<DeviceSend> device_send;  // a message with device tensors
    net::OutFrame frame;                      // any other message
  };
  OutgoingMessage encode(int to, wire::FrameHeader header,
                         const std::function<void(Encoder&)>& fill);
  struct OutgoingCall;
  bool try_take_credit(OutgoingCall& call);
  OutgoingCall encode_call(PendingCalls::Call& waiting, base::Duration timeout,
                           const std::function<void(Encoder&)>& fill, const RRefHandle* target);
  bool register_call(OutgoingCall& call, PendingCalls::Call waiting,
                     const std::shared_ptr<RRefHandle>& target);
  void send_call(OutgoingCall call);
  bool await_credit(OutgoingCall& call);
  void send_deferred(OutgoingCall& call);
  void fail_if_unsent(const OutgoingCall& call, const base::Status& sent);
  void on_directory_on_loop(const wire::Directory& directory);
  void on_frame_on_loop(int rank, net::InFrame frame);
  void dispatch_on_loop(int rank, net::InFrame frame);
  void on_lost_on_loop(const Loss& loss);
  void on_returned_on_loop(int rank, const wire::Directory::Entry& entry);
  /// Returns the number of credit windows, one per rank; 0 before the ranks are known.
  int known_windows() const { return windows_are_known_ ? flows[0].windows.size() : 0; }
  std::unique_ptr<Window> make_window(int rank, bool is_small);
  void open_flows(int rank) {
    for (const bool is_small : {false, true}) {
      send_grants(is_small, flows[is_small].budget->open(peers.process(rank)));
    }
  }
  void fail_windows(int rank, const Error& error) {
    for (const Flow& flow : flows) flow.windows.at(rank).fail(error);
  }
  base::BufferPtr admit_on_loop(int rank, const wire::FrameHeader& header);
  base::Status send_control(int to, wire::FrameKind kind, uint64_t first, uint64_t second = 0,
                            uint64_t third = 0, uint32_t incarnation = 0) {
    net::OutFrame frame;
    frame.header = {.kind = kind,
                    .channel = static_cast<uint16_t>(incarnation),
                    .call_id = first,
                    .context_id = second,
                    .autograd_id = third};
    return send(to, std::move(frame));
  }
  /// Sends a reply and counts its unwritten bytes. While these are too many, calls of `to` wait.
  base::Status send_answer(int to, net::OutFrame frame) {
    frame.keep_alive =
        unwritten_->count(to, kCallCost + net::bytes_of(frame), std::move(frame.keep_alive));
    return send(to, std::move(frame));
  }
  void send_cancel(uint64_t id, int to) {
    if (to == options.rank) return cancel_call(to, id);
    // If the rank is lost, no cancel needs to be sent.
    static_cast<void>(send_control(to, wire::FrameKind::kCancel, id));
  }
  void queue_call(QueuedCall&& call) {
    call.arrived = base::Clock::now();
    if (take_own_call(call)) return;
    queued_calls_.push(std::move(call));
    // Posts one task for each call. If calls were cancelled or parked, some tasks find no call.
    pool.post([this] {
      auto next = queued_calls_.pop([this](int from) { return unwritten_->is_full(from); });
      if (next) execute(std::move(*next));
    });
  }
  /// Unless too many replies to rank `from` are unwritten, runs a parked call and posts the next
  /// one.
  void run_parked_call(int from) {
    auto [call, has_more] =
        queued_calls_.pop_parked(from, [this](int rank) { return unwritten_->is_full(rank); });
    if (has_more) pool.post([this, from] { run_parked_call(from); });
    if (call) execute(std::move(*call));
  }
  void disconnect();
  void stop();
  void cancel_call(int from, uint64_t id) {
    std::optional<QueuedCall> call = queued_calls_.take(from, id);
    if (!call) return;
    call->is_given_up = true;
    given_up_.post([this, call = std::move(*call)]() mutable {
      const TorchStateGuard guard;
      execute(std::move(call));
    });
  }
  /// Runs a call, or fails it if its caller has given up. Does nothing after this agent has ended.
  void execute(QueuedCall&& call);
  std::vector<Wait> waits_of_layers();
  void watch_waits_on_loop(std::set<base::TimePoint> reported);
  std::vector<std::shared_ptr<ChannelImpl>> channels() {
    std::lock_guard lock(channels_mutex_);
    std::vector<std::shared_ptr<ChannelImpl>> all;
    for (const auto& [number, channel] : channels_) all.push_back(channel);
    return all;
  }
  void receive_tensors(InMessage& message, uint64_t context, const std::string& function = {}) {
    message.await_device_tensors();
    if (message.header.autograd_id == 0) return;
    if (!hook || context == 0) wire::Reader::fail("gradients outside a context");
    hook->on_receive(context, message, function);
  }
  void answer(PendingCalls::Call& call, RawReply reply);
  std::shared_ptr<InMessage> read(const RawReply& reply);

  std::atomic<uint32_t> incarnation_{0};
  std::atomic<size_t> last_live_rrefs_{0};
  std::atomic<size_t> last_live_contexts_{0};
  std::mutex channels_mutex_;
  std::unordered_map<uint16_t, std::shared_ptr<ChannelImpl>> channels_;
  std::shared_ptr<UnwrittenReplies> unwritten_;
  std::atomic<bool> windows_are_known_{false};
  CallQueue queued_calls_;
  // Releases calls that their callers have given up.
  base::SerialThread given_up_{"dt-given-up",
                               [executor = shared_executor] { executor->enter_device(); }};
  std::atomic<uint64_t> next_call_{1};
  std::atomic<uint64_t> next_transfer_{1};
  std::atomic<uint64_t> calls_{0};
  std::atomic<uint64_t> bytes_out_{0};
  std::atomic<uint64_t> bytes_in_{0};
  std::atomic<bool> closed_{false};  // true: nothing more is sent
  std::atomic<std::thread::id> disconnecting_{};
  base::Promise<void> disconnected_;  // set when disconnect() has returned
  // Held by the thread that ends the agent. Recursive: user destructors may call close() again.
  std::recursive_mutex stopping_;
  bool stopped_ = false;  // guarded by stopping_; true: only the loop still runs

 public:
  /// Last member, so the loop's thread ends before the members that its handlers use are destroyed.
  net::Loop loop;
};

}  // namespace distrain::rpc
