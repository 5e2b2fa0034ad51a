#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/rpc/channel.h"
#include "message.h"

namespace distrain::collective {

class Core;
class SharedSpace;

// Note [Life of an operation]
//
// An operation has up to four steps; some ranks may take part in some of them only. A step is
// complete when a message has come from each rank that the step needs, or a mark if the operation
// is in shared memory; then `run_step` computes and, if another step follows, sends its messages.
//
//   Starting ──────> Collecting ──────> Ready ──────> Running ──────> Done
//        │              ^    │            │            │   │           ^
//        └──> Ready     └────│────────────│────────────┘   │           │
//                            └────────────┴────────────────┴───────────┘ on failure
//
//   Starting    the caller sends the first messages. Messages that arrive are kept.
//   Collecting  at least one message of the step is missing.
//   Ready       all messages of the step are here, and no thread computes yet.
//   Running     one thread computes, without the lock.
//   Done        the tensors hold the result, or `error_` is set.
//
// The caller starts the operation, and computes steps while it is inside wait_until(). The loop
// thread stores messages and failures, without any torch operation. A thread of the executor
// computes a Ready step if no thread waits for the operation, except the last step of a small
// operation: no other rank depends on it, and waking a thread costs more than the reduction.
//
// A failure in Starting or Running is only noted. The thread that runs the operation ends it, so
// that nobody writes to the caller's tensors once wait_until() has returned.
enum class OperationState : uint8_t { kStarting, kCollecting, kReady, kRunning, kDone };

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  /// This rank runs steps `first` to `steps` - 1, when it has received their messages.
  Operation(const OpSpec& spec, base::TimePoint deadline, int steps = 1, int first = 0)
      : spec_(spec), steps_(steps), deadline_(deadline), step_(first) {}
  virtual ~Operation() = default;

  /// Implement the functions of Pending. wait_until() throws the operation's error.
  bool done();
  bool wait_until(base::TimePoint limit);
  void expire();
  void fail(base::Error error);
  void run_ready();
  Core& core() const { return *core_; }
  rpc::Wait wait_locked() const;
  const OpSpec& spec() const { return spec_; }

 protected:
  uint64_t number() const { return number_; }

  /// Return whether `step` needs a message of group rank `from`, and the size of its data. By
  /// default each step needs the whole tensor of each other rank.
  virtual bool expects(int step, int from) const;
  virtual size_t expected_bytes(int, int) const { return spec_.bytes; }

  /// Returns true if `step` lacks something of group rank `from`: a message, or a mark in shared
  /// memory. Called with or without Core's mutex if is_shared(), else with it.
  virtual bool lacks(int step, int from) const;
  /// Returns true if the ranks take part by marks in shared memory, without messages. See
  /// Note [Collectives in shared memory] in shared_space.h.
  virtual bool is_shared() const { return false; }
  /// Announces to the other ranks of a shared operation that a thread reads their marks of `step`,
  /// or that it no longer does.
  virtual void watch(int /*step*/, bool /*begins*/) {}
  /// Returns true if this rank sends the error to the other ranks when the operation fails.
  virtual bool tells_others() const { return false; }
  /// Returns true if an error names group rank `from` as a rank from which nothing came.
  virtual bool is_missing(int step, int from) const { return lacks(step, from); }
  /// Called with Core's mutex when the operation has its number, and when it is Done.
  virtual void on_open_locked() {}
  virtual void on_end_locked() {}
  /// Returns the error of a rank whose header differs from this operation.
  std::optional<base::Error> mismatch(int from, const OpSpec& theirs) const;
  bool lacks_any(int step) const;
  /// Returns the operation's error, and whether the other ranks have been told that it fails.
  const std::optional<base::Error>& error_locked() const { return error_; }
  bool is_told_locked() const { return is_told_; }
  int step_locked() const { return step_; }
  bool is_done() const { return state_.load(std::memory_order_acquire) == OperationState::kDone; }
  /// Returns the bytes that this rank may send to group rank `to` before an answer comes.
  virtual size_t sent_bytes(int /*to*/) const { return spec_.bytes; }

  /// Returns whether other ranks wait for the messages that this rank sends in `step`.
  virtual bool is_awaited(int step) const { return step + 1 < steps_; }
  /// Sends the messages of step 0, on the caller's thread.
  virtual void start() = 0;
  /// Processes the inputs of `step`, without Core's mutex. Throws to fail the operation.
  virtual void run_step(int step) = 0;
  /// Returns the data that group rank `from` sent for `step`. Only for run_step().
  std::span<const uint8_t> input(int step, int from) const;

 private:
  friend class Core;

  OperationState state_locked() const { return state_.load(std::memory_order_relaxed); }
  bool ready_or_done() const {
    const OperationState state = state_.load(std::memory_order_acquire);
    return state == OperationState::kReady || state == OperationState::kDone;
  }
  void transition_locked(OperationState to);
  void open_locked(std::shared_ptr<Core> core, uint64_t number);
  void deliver_locked(int from, rpc::ChannelMessage message);
  std::optional<base::Error> check_locked(int from, const rpc::ChannelMessage& message) const;
  void fail_locked(base::Error error);
  void expire_locked() {
    if (state_locked() == OperationState::kCollecting) fail_locked(deadline_error_locked());
  }
  void end_locked(std::optional<base::Error> error);
  void settle_locked();
  void run_locked(std::unique_lock<std::mutex>& lock);
  void await_change(std::unique_lock<std::mutex>& lock, base::TimePoint limit);
  bool wants_executor_locked() const;
  base::Error deadline_error_locked() const;
  void ask_awaited_locked();
  /// Runs the steps of a shared operation on which other ranks wait, on the thread that begins it,
  /// except the reduction of a large tensor.
  void run_first_steps(std::unique_lock<std::mutex>& lock);
  /// Makes a shared operation Ready if the marks of the current step are complete.
  void look_locked() {
    if (is_shared() && state_locked() == OperationState::kCollecting && !lacks_any(step_)) {
      transition_locked(OperationState::kReady);
    }
  }
  /// Returns true if the current step or a later one lacks a message of group rank `from`.
  bool waits_for_locked(int from) const {
    for (int step = step_; step < steps_; ++step) {
      if (lacks(step, from)) return true;
    }
    return false;
  }
  /// Returns true if `from` has sent a message for this operation, so it has begun it.
  bool has_heard_locked(int from) const { return has_heard_[static_cast<size_t>(from)]; }
  std::string number_text() const;
  std::string name() const { return describe(spec_) + ", " + number_text(); }
  std::vector<int> missing_ranks_locked() const;

  const OpSpec spec_;
  const int steps_;
  const base::TimePoint deadline_;
  const base::TimePoint begun_ = base::Clock::now();

  std::shared_ptr<Core> core_;  // set by open_locked(), then constant
  uint64_t number_ = 0;
  int64_t traced_from_ = 0;  // begin time if the operation is traced, else 0

  // Guarded by Core's mutex, except that polling threads read `state_` without the mutex.
  std::atomic<OperationState> state_{OperationState::kStarting};
  int step_;
  size_t missing_ = 0;                      // messages of step `step_` that have not arrived
  int waiters_ = 0;                         // threads in wait_until()
  std::vector<rpc::ChannelMessage> inbox_;  // by step, then group rank; `from` < 0: missing
  std::vector<bool> has_heard_;             // by group rank
  std::optional<base::Error> failure_;      // first error while Starting or Running
  std::optional<base::Error> error_;
  bool is_told_ = false;     // another rank has refused the operation, or has been answered
  bool has_started_ = true;  // start() has not thrown
  std::condition_variable changed_;
};

}  // namespace distrain::collective
