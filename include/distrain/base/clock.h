#pragma once

#include <chrono>

namespace distrain::base {

/// The monotonic clock, which all deadlines use.
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

/// No deadline: a wait ends only when its event occurs or the peer that it waits for is lost.
inline constexpr TimePoint kNever = TimePoint::max();

/// Returns the time `timeout` from now, or kNever if the clock cannot represent that time.
inline TimePoint deadline_after(std::chrono::nanoseconds timeout) {
  const TimePoint now = Clock::now();
  return timeout < kNever - now ? now + std::chrono::duration_cast<Duration>(timeout) : kNever;
}

/// Waits on `condition`, a std::condition_variable, until `done()` returns true. Returns false if
/// `deadline` passes first.
template <class Condition, class Lock, class Done>
bool wait_until(Condition& condition, Lock& lock, TimePoint deadline, Done done) {
  if (deadline != kNever) return condition.wait_until(lock, deadline, done);
  condition.wait(lock, done);
  return true;
}

inline double seconds_since(TimePoint start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace distrain::base
