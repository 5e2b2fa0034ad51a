#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "distrain/base/clock.h"
#include "distrain/base/future.h"
#include "distrain/base/result.h"

namespace distrain::membership {

/// The rounds in which all ranks end together, as a thread of this rank waits for them: one at a
/// time. Thread-safe.
class EndRounds {
 public:
  /// Begins a round. Returns an error after fail_all().
  base::Result<base::Future<uint64_t>> begin() {
    std::lock_guard lock(mutex_);
    if (failed_) return *failed_;
    began_ = base::Clock::now();
    return current_.emplace().future();
  }
  /// Takes the promise of the current round, if there is one.
  std::optional<base::Promise<uint64_t>> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(current_, std::nullopt);
  }
  /// Fails the current round and all later ones.
  void fail_all(const base::Error& error) {
    {
      std::lock_guard lock(mutex_);
      if (!failed_) failed_ = error;
    }
    if (auto round = take()) round->fail(error);
  }
  /// Returns when the current round began, if there is one.
  std::optional<base::TimePoint> waiting_since() const {
    std::lock_guard lock(mutex_);
    return current_ ? std::optional(began_) : std::nullopt;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<base::Promise<uint64_t>> current_;
  base::TimePoint began_{};
  std::optional<base::Error> failed_;
};

}  // namespace distrain::membership
