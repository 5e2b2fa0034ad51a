#pragma once

#include <atomic>

namespace distrain::scenario {

/// How SIGTERM reaches a job that wants to save before it ends. Thread-safe.
class StopSignal {
 public:
  /// From now on the job looks at requested() at every step and ends by itself. Before, and for
  /// jobs that never say so, the signal ends the process at once.
  void arm() { armed_ = true; }
  /// From now on the signal ends the process at once again.
  void disarm() { armed_ = false; }
  bool armed() const { return armed_; }

  /// The signal has come. False if the job will not see to it.
  bool request() { return armed_ && !requested_.exchange(true); }
  bool requested() const { return requested_; }

 private:
  std::atomic<bool> armed_{false};
  std::atomic<bool> requested_{false};
};

}  // namespace distrain::scenario
