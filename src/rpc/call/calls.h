#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

// Body of kCall: string function · u32 milliseconds that the caller waits (0: for ever) · u8 mode ·
// (remote: u64 RRef id · u64 fork) · arguments

enum class CallMode : uint8_t { kCall = 0, kRemote = 1 };

/// Returns `timeout` in milliseconds, as it is encoded in a call; 0 means no timeout.
inline uint32_t wait_ms(base::Duration timeout) {
  if (timeout == base::Duration::max()) return 0;
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(ms, 1, UINT32_MAX));
}

/// Prefix of the functions that collect the trace; their calls are not traced.
inline constexpr std::string_view kTraceFunctions = "distrain.trace.";

/// Returns `tracer` if it records calls of `function`; otherwise null.
inline base::Tracer* tracer_of(const std::shared_ptr<base::Tracer>& tracer,
                               std::string_view function) {
  if (!tracer || !tracer->on() || function.starts_with(kTraceFunctions)) return nullptr;
  return tracer.get();
}

/// Returns the id that links the two sides of a call in the trace. Both ranks can compute it.
inline uint64_t flow_id(int caller, uint64_t call_id) {
  return (static_cast<uint64_t>(caller) << 40) | call_id;
}

/// Records one side of a call in the trace: the time span on this thread, and the start or the end
/// of the flow (arrow) that links the two sides.
class CallSlice : public base::TraceSlice {
 public:
  explicit CallSlice(base::Tracer* tracer)
      : TraceSlice(tracer ? &tracer->lane() : nullptr, {.name = "call", .category = "rpc"}) {}

  void drop() {
    if (lane_) lane_->close();
    lane_ = nullptr;
  }
  void set_name(std::string_view prefix, std::string_view function) {
    event_.name = lane_->tracer().intern(prefix, function);
  }
  void set_flow(base::TraceEvent::Kind kind, uint64_t id, base::TimePoint left = {}) {
    event_.kind = kind;
    event_.id = id;
    event_.value = left.time_since_epoch().count();
  }
  explicit operator bool() const { return lane_ != nullptr; }
};

/// This rank's calls that wait for a reply. Each ends exactly once: by its reply, its deadline or
/// the loss of its peer. Thread-safe.
class PendingCalls {
 public:
  struct Call {
    explicit Call(net::Loop& loop) : promise(loop.event_loop()) {}

    base::Promise<RawReply> promise;
    int to = -1;
    std::string function;
    base::TimePoint started;
    base::TimePoint deadline = base::kNever;
    uint64_t context = 0;
    uint64_t autograd_id = 0;         // of the arguments' send node in `context`
    bool is_remote = false;           // a remote() call: the reply has no value
    const char* traced_as = nullptr;  // the event's name if the call is traced, else null
    std::vector<std::shared_ptr<const void>> holds;  // keeps alive what the arguments refer to
  };

  /// Called before a failed call's future fails; may run on the loop. If `given_up`, this rank no
  /// longer waits, but the peer may still run the call.
  using OnFailure = std::function<void(uint64_t id, const Call& call, bool given_up)>;

  PendingCalls(net::Loop& loop, base::Executor& executor, int rank,
               std::shared_ptr<base::Tracer> tracer, OnFailure on_failure)
      : loop_(loop),
        executor_(executor),
        rank_(rank),
        tracer_(std::move(tracer)),
        on_failure_(std::move(on_failure)) {}

  /// Adds a waiting call. After fail_all(), fails the call and returns false instead.
  bool add(uint64_t id, Call call);
  /// take() and fail() remove the call `id` if it still waits for a reply of rank `from`. fail()
  /// also fails the call.
  std::optional<Call> take(uint64_t id, int from) {
    std::lock_guard lock(mutex_);
    const auto it = calls_.find(id);
    if (it == calls_.end() || it->second.to != from) return std::nullopt;
    return take_locked(it).second;
  }
  void fail(uint64_t id, int from, base::Error error) {
    if (auto call = take(id, from)) fail_taken(id, *call, std::move(error));
  }
  /// Sets the deadline of the call `id`, which has none, if the call still waits.
  void set_deadline(uint64_t id, base::TimePoint deadline);
  bool is_waiting(uint64_t id) const {
    std::lock_guard lock(mutex_);
    return calls_.contains(id);
  }
  /// Ends the call `id`, because nobody waits for its future any more.
  void give_up(uint64_t id, int to) {
    if (const auto call = take(id, to)) on_failure_(id, *call, true);
  }

  std::vector<Wait> waits();

  void fail_all_to(int rank, const base::Error& error) {
    for (auto& [id, call] : take_all(rank)) {
      base::Error own = error;
      own.op = call.function;
      fail_taken(id, call, std::move(own));
    }
  }
  /// Fails all waiting calls and, from now on, each new call.
  void fail_all(const base::Error& error) {
    {
      std::lock_guard lock(mutex_);
      closed_ = error;
    }
    for (auto& [id, call] : take_all(-1)) fail_taken(id, call, error);
  }
  /// Blocks until no call waits for a reply.
  void wait_until_drained() {
    base::check_may_wait("waiting for replies");
    const base::BlockingScope blocking;
    std::unique_lock lock(mutex_);
    drained_.wait(lock, [this] { return calls_.empty(); });
  }

 private:
  using Calls = std::unordered_map<uint64_t, Call>;

  void expire_on_loop(base::TimePoint when);
  /// Sets a timer for the earliest deadline, unless an earlier timer is set. For a new call, an
  /// older call has usually set a timer, so the loop is not woken up. Replaced timers expire
  /// without effect.
  void arm_locked() {
    if (deadlines_.empty() || deadlines_.begin()->first >= armed_for_) return;
    armed_for_ = deadlines_.begin()->first;
    loop_.call_at(armed_for_, [this, when = armed_for_] { expire_on_loop(when); });
  }
  /// Removes a call from `calls_` and, if it is traced, records it.
  std::pair<uint64_t, Call> take_locked(Calls::iterator it);
  /// Removes and returns the calls to `rank`, or all calls if `rank` is -1.
  std::vector<std::pair<uint64_t, Call>> take_all(int rank);
  void fail_taken(uint64_t id, Call& call, base::Error error, bool given_up = false) {
    on_failure_(id, call, given_up);
    call.promise.fail(std::move(error));
  }

  net::Loop& loop_;
  base::Executor& executor_;
  const int rank_;
  const std::shared_ptr<base::Tracer> tracer_;
  const OnFailure on_failure_;
  mutable std::mutex mutex_;
  Calls calls_;
  std::set<std::pair<base::TimePoint, uint64_t>> deadlines_;
  base::TimePoint armed_for_ = base::kNever;
  std::optional<base::Error> closed_;
  std::condition_variable drained_;  // notified when `calls_` becomes empty
};

}  // namespace distrain::rpc
