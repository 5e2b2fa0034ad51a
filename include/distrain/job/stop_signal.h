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

/// Signals to end within this time count as one, because a process may get one signal twice:
/// timeout(1), Slurm and systemd signal a process and its group, a closed terminal and its shell
/// both signal, and the launcher forwards signals to its ranks.
inline constexpr auto kSameSignal = std::chrono::seconds(2);

/// Connects signals to a job: SIGINT, SIGTERM and SIGHUP make it save and end, SIGUSR1 makes it
/// save and continue, and SIGQUIT asks for its waits. Thread-safe except for heeds().
class StopSignal {
 public:
  /// Notes that the job checks requested() at every step and ends by itself. Without arm(), a
  /// signal ends the process at once. Has no effect after disarm().
  void arm() {
    State expected = State::kUnarmed;
    state_.compare_exchange_strong(expected, State::kArmed);
  }
  /// Notes that everything is saved. Later signals end the process at once, unless the job was
  /// `stopped` by a signal, which this rank may receive late. Returns requested().
  bool disarm(bool stopped) {
    State state = state_;
    while (!state_.compare_exchange_weak(
        state, stopped || state == State::kStopping ? State::kStopping : State::kOver)) {
    }
    return requested();
  }

  /// Requests a stop because this rank or another one got the signal. Returns false if the job is
  /// not armed or is stopping already.
  bool request() {
    State expected = State::kArmed;
    if (!state_.compare_exchange_strong(expected, State::kStopping)) return false;
    std::lock_guard lock(mutex_);
    if (on_request_) on_request_();
    return true;
  }
  /// Calls `tell` when the first request() succeeds, on its thread, or at once if one has. `tell`
  /// must not wait. If `tell` is empty, the former function is not called after this returns.
  void on_request(std::function<void()> tell) {
    std::lock_guard lock(mutex_);
    on_request_ = std::move(tell);
    if (on_request_ && state_ == State::kStopping) on_request_();
  }
  /// Requests a save without a stop (SIGUSR1). Does nothing unless armed().
  void request_save() {
    std::lock_guard lock(mutex_);
    if (armed() && on_save_) on_save_();
  }
  /// Calls `tell` in each request_save(). Otherwise as on_request().
  void on_save(std::function<void()> tell) {
    std::lock_guard lock(mutex_);
    on_save_ = std::move(tell);
  }
  /// Returns what this rank waits for (SIGQUIT), by the function of on_question(), if any.
  std::vector<rpc::Wait> waits() {
    std::lock_guard lock(question_mutex_);
    return on_question_ ? on_question_() : std::vector<rpc::Wait>();
  }
  /// Sets the function that answers waits(); the former one is not called after this returns.
  void on_question(std::function<std::vector<rpc::Wait>()> waits) {
    std::lock_guard lock(question_mutex_);
    on_question_ = std::move(waits);
  }
  bool requested() const { return state_ == State::kStopping; }
  bool armed() const { return state_ == State::kArmed; }
  /// Returns the signal that this process has received; 0 if only another rank has received one.
  int number() const { return number_; }
  /// Handles the signal `number`. Returns false if the caller is to end the process at once.
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
  std::function<void()> on_request_, on_save_;           // guarded by mutex_
  std::mutex question_mutex_;                            // separate, as an answer may take long
  std::function<std::vector<rpc::Wait>()> on_question_;  // guarded by question_mutex_
  base::TimePoint heeded_{};  // time of the first signal; used by the thread of heeds()
};

}  // namespace distrain::job
