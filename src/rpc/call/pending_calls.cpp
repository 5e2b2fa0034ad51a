#include <fmt/format.h>

#include "call/calls.h"

namespace distrain::rpc {

bool PendingCalls::add(uint64_t id, Call call) {
  std::unique_lock lock(mutex_);
  if (closed_) {
    const base::Error error = *closed_;
    lock.unlock();
    fail_taken(id, call, error);
    return false;
  }
  if (call.deadline != base::kNever) deadlines_.emplace(call.deadline, id);
  calls_.emplace(id, std::move(call));
  arm_locked();
  return true;
}

void PendingCalls::set_deadline(uint64_t id, base::TimePoint deadline) {
  if (deadline == base::kNever) return;
  std::lock_guard lock(mutex_);
  const auto call = calls_.find(id);
  if (call == calls_.end()) return;
  call->second.deadline = deadline;
  deadlines_.emplace(deadline, id);
  arm_locked();
}

std::pair<uint64_t, PendingCalls::Call> PendingCalls::take_locked(Calls::iterator it) {
  const uint64_t id = it->first;
  Call call = std::move(it->second);
  calls_.erase(it);
  if (calls_.empty()) drained_.notify_all();
  if (call.deadline != base::kNever) deadlines_.erase({call.deadline, id});
  if (call.traced_as) {
    tracer_->record({base::TraceEvent::Kind::kAsync, call.traced_as, "rpc", "to", call.to,
                     call.started.time_since_epoch().count(), base::Tracer::now(),
                     flow_id(rank_, id)});
  }
  return {id, std::move(call)};
}

std::vector<std::pair<uint64_t, PendingCalls::Call>> PendingCalls::take_all(int rank) {
  std::vector<std::pair<uint64_t, Call>> taken;
  std::lock_guard lock(mutex_);
  for (auto it = calls_.begin(); it != calls_.end();) {
    const auto call = it++;
    if (rank < 0 || call->second.to == rank) taken.push_back(take_locked(call));
  }
  return taken;
}

std::vector<Wait> PendingCalls::waits() {
  std::lock_guard lock(mutex_);
  std::vector<Wait> waits;
  for (const auto& [id, call] : calls_) {
    waits.push_back({fmt::format("{}, called on rank {}", call.function, call.to), call.started});
  }
  return waits;
}

void PendingCalls::expire_on_loop(base::TimePoint when) {
  std::vector<std::pair<uint64_t, Call>> expired;
  {
    std::lock_guard lock(mutex_);
    if (armed_for_ != when) return;
    armed_for_ = base::kNever;
    const base::TimePoint now = base::Clock::now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      expired.push_back(take_locked(calls_.find(deadlines_.begin()->second)));
    }
    arm_locked();
  }
  for (auto& [id, call] : expired) {
    const std::string text = fmt::format("rank {} did not answer '{}' within {:.3g} s", call.to,
                                         call.function, base::seconds_since(call.started));
    fail_taken(id, call, {base::ErrorKind::kDeadline, text, call.to, call.function}, true);
  }
  if (expired.empty()) return;
  // Destroys the calls on a worker, because their arguments may own user objects.
  executor_.post([expired = std::move(expired)]() mutable { expired.clear(); });
}

}  // namespace distrain::rpc
