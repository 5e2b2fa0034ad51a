#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/rpc/channel.h"

namespace distrain::job {

/// A signal that ends jobs, so soon after another, is the same one: timeout(1), Slurm and systemd
/// signal a process and its group, a terminal that closes and its shell both do, and the launcher
/// passes on what its ranks may have had already.
inline constexpr auto kSameSignal = std::chrono::seconds(2);

/// How SIGINT, SIGTERM and SIGHUP reach a job that wants to save before it ends, SIGUSR1 one that
/// saves and goes on, and SIGQUIT one that tells its waits. Thread-safe, but for heeds().
class StopSignal {
 public:
  /// From now on the job looks at requested() at every step and ends by itself. Before, and for
  /// jobs that never say so, the signal ends the process at once. Nothing after disarm().
  void arm() {
    State expected = State::kUnarmed;
    state_.compare_exchange_strong(expected, State::kArmed);
  }
  /// All is saved. From now on the signal ends the process at once again, unless the job is
  /// `stopped` by one, which this rank may get late. Returns requested().
  bool disarm(bool stopped) {
    State state = state_;
    while (!state_.compare_exchange_weak(
        state, stopped || state == State::kStopping ? State::kStopping : State::kOver)) {
    }
    return requested();
  }

  /// The signal has come, here or on another rank. False if the job does not heed it, or does
  /// already.
  bool request() {
    State expected = State::kArmed;
    if (!state_.compare_exchange_strong(expected, State::kStopping)) return false;
    std::lock_guard lock(mutex_);
    if (on_request_) on_request_();
    return true;
  }
  /// Runs `tell` when request() is first heeded, on its thread; at once if it was. It must not
  /// wait. Empty: nobody is told any more, once this returns.
  void on_request(std::function<void()> tell) {
    std::lock_guard lock(mutex_);
    on_request_ = std::move(tell);
    if (on_request_ && state_ == State::kStopping) on_request_();
  }
  /// SIGUSR1: the job is to save now, and to go on. Nothing where a stop would not be seen to.
  void request_save() {
    std::lock_guard lock(mutex_);
    if (armed() && on_save_) on_save_();
  }
  /// As on_request(), of request_save().
  void on_save(std::function<void()> tell) {
    std::lock_guard lock(mutex_);
    on_save_ = std::move(tell);
  }
  /// SIGQUIT: what this rank waits for; nothing where nobody has said how to know.
  std::vector<rpc::Wait> waits() {
    std::lock_guard lock(question_mutex_);
    return on_question_ ? on_question_() : std::vector<rpc::Wait>();
  }
  /// `waits` answers from now on. Empty: nobody is asked any more, once this returns.
  void on_question(std::function<std::vector<rpc::Wait>()> waits) {
    std::lock_guard lock(question_mutex_);
    on_question_ = std::move(waits);
  }
  bool requested() const { return state_ == State::kStopping; }
  /// Whether a request() would be seen to.
  bool armed() const { return state_ == State::kArmed; }

  /// The signal that this process has got itself, if the job saw to it; 0 where another rank told.
  int number() const { return number_; }

  /// The signal `number` has come. True if the job heeds it, else it ends the process.
  bool heeds(int number, base::TimePoint now) {
    const bool is_first = heeded_ == base::TimePoint{};
    if (is_first) number_ = number;  // before request(), or the job might end without it
    if (request() || (is_first && requested())) {
      heeded_ = now;
      return true;
    }
    return requested() && now - heeded_ < kSameSignal;
  }

 private:
  enum class State : uint8_t { kUnarmed, kArmed, kStopping, kOver };

  std::atomic<State> state_{State::kUnarmed};
  std::atomic<int> number_{0};
  std::mutex mutex_;
  std::function<void()> on_request_, on_save_;           // by mutex_
  std::mutex question_mutex_;                            // its own: an answer may take long
  std::function<std::vector<rpc::Wait>()> on_question_;  // by question_mutex_
  base::TimePoint heeded_{};  // the first signal that the job saw to; by the thread of heeds()
};

}  // namespace distrain::job
