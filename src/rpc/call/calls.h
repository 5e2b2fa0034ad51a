#pragma once

#include <algorithm>
#include <chrono>
#include <iterator>
#include <list>

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

// Body of kCall: string function · u32 milliseconds that the caller waits (0: for ever) · u8 mode ·
// (remote: u64 RRef id · u64 fork) · arguments

enum class CallMode : uint8_t { kCall = 0, kRemote = 1 };

/// Returns `timeout` as a call encodes it.
inline uint32_t wait_ms(base::Duration timeout) {
  if (timeout == base::Duration::max()) return 0;
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(ms, 1, UINT32_MAX));
}

/// Returns `error` with this rank and function as origin, unless it has another origin.
inline base::Error with_origin(base::Error error, int rank, const std::string& op) {
  if (error.rank < 0) error.rank = rank;
  if (error.op.empty()) error.op = op;
  return error;
}

/// Prefix of the functions that collect the trace; their calls are not traced.
inline constexpr std::string_view kTraceFunctions = "distrain.trace.";

/// Returns `tracer` if it records calls of `function`; otherwise null.
inline base::Tracer* tracer_of(const std::shared_ptr<base::Tracer>& tracer,
                               std::string_view function) {
  if (!tracer || !tracer->on() || function.starts_with(kTraceFunctions)) return nullptr;
  return tracer.get();
}

/// Returns the id of a call in the trace, which both of its sides can compute.
inline uint64_t flow_id(int caller, uint64_t call_id) {
  return (static_cast<uint64_t>(caller) << 40) | call_id;
}

/// Records one side of a call as a slice of this thread, with that side's end of the flow.
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

/// The calls of this rank that wait for their reply. Each ends once: by its reply, its deadline or
/// the loss of its peer, whichever is first. Thread-safe.
class PendingCalls {
 public:
  struct Call {
    base::Promise<RawReply> promise;
    int to = -1;
    std::string function;
    base::TimePoint started;
    base::TimePoint deadline = base::kNever;
    uint64_t context = 0;
    uint64_t autograd_id = 0;         // of its arguments, in the context
    bool is_remote = false;           // its reply has no value
    const char* traced_as = nullptr;  // the function's name if the call is traced, else null
    std::vector<std::shared_ptr<const void>> holds;  // keeps alive what the arguments refer to
  };

  /// Called for each call that fails, before its future fails. May be called on the loop.
  /// `given_up`: this rank no longer waits, but the peer may still run the call.
  using OnFailure = std::function<void(uint64_t id, const Call& call, bool given_up)>;

  PendingCalls(net::Loop& loop, base::Executor& executor, int rank,
               std::shared_ptr<base::Tracer> tracer, OnFailure on_failure)
      : loop_(loop),
        executor_(executor),
        rank_(rank),
        tracer_(std::move(tracer)),
        on_failure_(std::move(on_failure)) {}

  /// Returns false, and fails the call, after fail_all().
  bool add(uint64_t id, Call call);
  /// Take out, or fail, the call `id` if it went to `from` and still waits.
  std::optional<Call> take(uint64_t id, int from) {
    std::unique_lock lock(mutex_);
    const auto it = calls_.find(id);
    if (it == calls_.end() || it->second.to != from) return std::nullopt;
    std::optional<Call> call = take_locked(it).second;
    complete_if_drained(std::move(lock));
    return call;
  }
  void fail(uint64_t id, int from, base::Error error) {
    if (auto call = take(id, from)) fail_taken(id, *call, std::move(error));
  }
  /// Sets the deadline of the call `id`, which had none, if it still waits.
  void set_deadline(uint64_t id, base::TimePoint deadline) {
    if (deadline == base::kNever) return;
    std::lock_guard lock(mutex_);
    const auto call = calls_.find(id);
    if (call == calls_.end()) return;
    call->second.deadline = deadline;
    deadlines_.emplace(deadline, id);
    arm_locked();
  }
  bool is_waiting(uint64_t id) const {
    std::lock_guard lock(mutex_);
    return calls_.contains(id);
  }
  /// Ends the call `id`, whose future nobody waits for any more.
  void give_up(uint64_t id, int to) {
    if (const auto call = take(id, to)) on_failure_(id, *call, true);
  }

  std::vector<Wait> waits();

  void fail_all_to(int rank, const base::Error& error);
  /// Also makes later calls fail at once.
  void fail_all(const base::Error& error);
  /// Returns a future that is complete when no call waits. One at a time.
  base::Future<void> drained() {
    std::lock_guard lock(mutex_);
    if (calls_.empty()) return base::Future<void>::ready({});
    drained_.emplace();
    return drained_->future();
  }

 private:
  using Calls = std::unordered_map<uint64_t, Call>;

  void expire_on_loop(base::TimePoint when);
  void arm_locked();
  /// Takes a call out of `calls_` and ends it in the trace.
  std::pair<uint64_t, Call> take_locked(Calls::iterator it);
  /// Takes out the calls to `rank`; if it is -1, all calls.
  std::vector<std::pair<uint64_t, Call>> take_all(int rank);
  /// Called with `mutex_` locked. Unlocks it before it completes the promise.
  void complete_if_drained(std::unique_lock<std::mutex> lock);
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
  std::optional<base::Promise<void>> drained_;
};

/// A call that has arrived and not begun.
struct QueuedCall {
  int from = -1;
  uint32_t incarnation = 0;  ///< of the calling rank
  uint64_t id = 0;
  base::TimePoint arrived{};
  std::shared_ptr<InMessage> message{};  ///< if this rank called itself
  net::InFrame frame{};                  ///< otherwise
  std::shared_ptr<DeviceReceive> device_receive{};
  uint64_t credit = 0;       ///< that the call took
  bool is_given_up = false;  ///< by its caller: the call only has to be released
  bool is_parked = false;    ///< in its queue, until its caller has read more replies
};

/// The calls that wait for a thread, in order of arrival. Calls of ranks that do not read their
/// replies are parked, for each rank. Thread-safe.
class CallQueue {
 public:
  void push(QueuedCall&& call) {
    std::lock_guard lock(mutex_);
    if (spare_.empty()) {
      calls_.push_back(std::move(call));
    } else {
      spare_.front() = std::move(call);
      calls_.splice(calls_.end(), spare_, spare_.begin());
    }
    if (has_index_) add_to_index_locked(std::prev(calls_.end()));
  }
  /// Takes the first call whose rank is not `blocked(rank)`, and parks the calls before it.
  template <class F>
  std::optional<QueuedCall> pop(const F& blocked) {
    std::lock_guard lock(mutex_);
    while (!calls_.empty()) {
      const Position first = calls_.begin();
      const bool is_behind_others = !parked_.empty() && parked_.contains(first->from);
      if (!is_behind_others && !blocked(first->from)) return take_locked(first);
      first->is_parked = true;
      std::list<QueuedCall>& parked = parked_[first->from];
      parked.splice(parked.end(), calls_, first);
    }
    return std::nullopt;
  }
  /// Takes the first parked call of rank `from`, unless blocked; also returns if more are parked.
  template <class F>
  std::pair<std::optional<QueuedCall>, bool> pop_parked(int from, const F& blocked) {
    std::lock_guard lock(mutex_);
    const auto parked = parked_.find(from);
    if (parked == parked_.end() || blocked(from)) return {};
    std::optional<QueuedCall> call = take_locked(parked->second.begin());
    return {std::move(call), parked_.contains(from)};
  }
  /// Takes the call `id` of rank `from`, if it is queued.
  std::optional<QueuedCall> take(int from, uint64_t id) {
    std::lock_guard lock(mutex_);
    if (!has_index_) {
      has_index_ = true;
      for (auto call = calls_.begin(); call != calls_.end(); ++call) add_to_index_locked(call);
      for (auto& [rank, parked] : parked_) {
        for (auto call = parked.begin(); call != parked.end(); ++call) add_to_index_locked(call);
      }
    }
    const auto position = index_[from].find(id);
    if (position == index_[from].end()) return std::nullopt;
    return take_locked(position->second);
  }
  void drop_all_of(int from) {
    std::list<QueuedCall> dropped;  // destroyed without the lock
    std::lock_guard lock(mutex_);
    for (auto call = calls_.begin(); call != calls_.end();) {
      const auto next = std::next(call);
      if (call->from == from) dropped.splice(dropped.end(), calls_, call);
      call = next;
    }
    if (const auto parked = parked_.find(from); parked != parked_.end()) {
      dropped.splice(dropped.end(), parked->second);
      parked_.erase(parked);
    }
    index_.erase(from);
  }

 private:
  using Position = std::list<QueuedCall>::iterator;
  static constexpr size_t kMaxSpare = 64;

  void add_to_index_locked(Position position) {
    index_[position->from].insert_or_assign(position->id, position);
  }

  std::optional<QueuedCall> take_locked(Position position) {
    std::optional<QueuedCall> call(std::move(*position));
    if (has_index_) {
      auto& positions = index_[call->from];
      const auto known = positions.find(call->id);
      // A faulty peer may have used one id twice.
      if (known != positions.end() && known->second == position) positions.erase(known);
    }
    std::list<QueuedCall>& queue = call->is_parked ? parked_[call->from] : calls_;
    if (spare_.size() < kMaxSpare) {
      spare_.splice(spare_.begin(), queue, position);
    } else {
      queue.erase(position);
    }
    if (call->is_parked && queue.empty()) parked_.erase(call->from);
    if (calls_.empty() && parked_.empty() && has_index_) {
      has_index_ = false;
      index_.clear();
    }
    return call;
  }

  std::mutex mutex_;
  std::list<QueuedCall> calls_;
  std::list<QueuedCall> spare_;                            // empty nodes for reuse
  std::unordered_map<int, std::list<QueuedCall>> parked_;  // by rank; no list is empty
  // By rank and id. Built when the first call is cancelled, and kept while calls wait.
  std::unordered_map<int, std::unordered_map<uint64_t, Position>> index_;
  bool has_index_ = false;
};

}  // namespace distrain::rpc
