#pragma once

#include <chrono>

namespace distrain::base {

/// All deadlines are on the monotonic clock.
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

/// "No deadline": the wait lives as long as the peer it waits for.
inline constexpr TimePoint kNever = TimePoint::max();

/// kNever if that is further away than the clock reaches.
inline TimePoint deadline_after(std::chrono::nanoseconds timeout) {
  const TimePoint now = Clock::now();
  return timeout < kNever - now ? now + std::chrono::duration_cast<Duration>(timeout) : kNever;
}

inline double seconds_since(TimePoint start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace distrain::base
