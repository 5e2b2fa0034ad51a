#pragma once

#include <algorithm>
#include <mutex>

#include <c10/util/ScopeExit.h>

#include "distrain/base/deferred_tasks.h"
#include "distrain/optim/distributed_optimizer.h"
#include "parameter_set.h"

namespace distrain::optim {

/// The options of one group, whose parameters are consecutive in the ParameterUpdater's list.
struct GroupOptions {
  OptimizerFields options;
  uint64_t parameters = 0;  ///< number of parameters
  uint64_t number = 0;      ///< the group's index in DistributedOptimizer's `groups`, for errors

  bool operator==(const GroupOptions& other) const {
    return options == other.options && parameters == other.parameters;
  }
  static constexpr auto kFields =
      std::tuple(&GroupOptions::options, &GroupOptions::parameters, &GroupOptions::number);
};

/// Settings that must be equal on all ranks that share a ParameterUpdater.
struct UpdaterOptions {
  std::vector<GroupOptions> groups;  ///< the groups with parameters on this rank
  Sharing::Mode mode = Sharing::Mode::kAsync;
  int participants = 1;
  int64_t staleness = 0;

  bool operator==(const UpdaterOptions&) const = default;
  static constexpr auto kFields =
      std::tuple(&UpdaterOptions::groups, &UpdaterOptions::mode, &UpdaterOptions::participants,
                 &UpdaterOptions::staleness);
};

/// Optimizes a set of one rank's parameters and holds their state. Thread-safe: one step at a time.
class ParameterUpdater {
 public:
  /// If `updates` is not null, each update increments it.
  ParameterUpdater(rpc::Agent& agent, const std::vector<at::Tensor>& parameters,
                   UpdaterOptions options, std::shared_ptr<std::atomic<uint64_t>> updates);

  /// Registers `process` as a process of `participant`. If all processes of the participant are
  /// lost, replaces them and raises its number of steps to that of the slowest other participant.
  void take_part(int participant, rpc::ProcessNumber process);

  /// Applies a participant's gradients. The future completes when the participant may begin its
  /// next step (see Sharing::Mode), with the number of updates including this one. Outside kSync,
  /// throws `peer_lost` if `process` no longer is a process of the participant.
  base::Future<uint64_t> step(const StepOptions& options, Gradients gradients,
                              rpc::ProcessNumber process);

  /// Returns the squared norms of the gradients that step() would apply. In kSync the future
  /// completes when all participants have called norms_squared(), with the norm of the mean
  /// gradients and the mean of `arguments.own`. Otherwise the norms are this participant's.
  base::Future<Norms> norms_squared(const NormArguments& arguments, Gradients gradients);

  /// Throws `invalid` if this updater has different parameters or options.
  void check_same(const std::vector<at::Tensor>& parameters, const UpdaterOptions& options) const;

  /// Handles the loss of a rank. If the mode is not kSync and the job continues without the rank,
  /// no participant waits for the lost process any more and none of its steps is applied. Otherwise
  /// every current and later wait for other participants fails with the rank-loss error.
  void on_rank_lost(const rpc::Loss& loss);
  /// Records that `process` pauses. Until its next step, no participant waits for it.
  void rest(rpc::ProcessNumber process) {
    base::DeferredTasks done;
    const std::unique_lock guard = lock();
    stop_stepping_locked(process, Participant::State::kResting);
    complete_waiting_steps_locked(done);
  }
  /// Notes that `process` has stopped. In kSync and kSsp, waiting for its steps throws `peer_lost`.
  void leave(rpc::ProcessNumber process);
  /// Returns true if `process` is registered, even if it is lost.
  bool has(rpc::ProcessNumber process) const {
    const std::unique_lock guard = lock();
    return std::ranges::any_of(participants_, [process](const Participant& each) {
      return each.processes.contains(process);
    });
  }
  /// Returns the number of the last step of `process`. Returns nullopt if the mode is kSync, or if
  /// `process` does not number its steps.
  std::optional<int64_t> last_step_of(rpc::ProcessNumber process) const {
    const std::unique_lock guard = lock();
    for (const Participant& each : participants_) {
      const auto its = each.processes.find(process);
      if (its != each.processes.end() && options_.mode != Sharing::Mode::kSync) {
        return its->second.is_numbered ? std::optional(its->second.last_step) : std::nullopt;
      }
    }
    return std::nullopt;
  }

  /// Describes the steps that wait for other participants or, if an update is running, only that.
  std::vector<rpc::Wait> waits() const;

  std::vector<ParameterState> state() const;
  /// Loads `state`. Throws `bad_data` and changes nothing if `state` does not fit.
  void load_state(const std::vector<ParameterState>& state);
  Progress progress(int participant) const {
    const std::unique_lock guard = lock();
    return {applied_, lead_locked(participant)};
  }

  const std::vector<at::Tensor>& parameters() const { return set_.parameters(); }

 private:
  // The arguments of one collective step (or norm), collected until all participants have called.
  template <class R, class Arguments>
  struct Gathering {
    struct Part {
      Arguments arguments;
      Gradients gradients;
    };
    std::map<int, Part> parts;  // by participant
    std::vector<base::Promise<R>> waiting;
    base::TimePoint since;  // when the first participant called
  };

  struct Participant {
    enum class State : uint8_t { kStepping, kResting, kLeft, kLost };
    struct Process {
      bool is_lost = false;
      bool is_numbered = true;  // all steps of the process so far have numbers
      int64_t last_step = 0;    // the number of the process's last step
    };
    State state = State::kStepping;
    int64_t steps = 0;
    std::map<rpc::ProcessNumber, Process> processes;  // registered by take_part()

    bool has(rpc::ProcessNumber process) const {
      const auto its = processes.find(process);
      return its != processes.end() && !its->second.is_lost;
    }
    bool is_lost() const {
      return !processes.empty() &&
             std::ranges::all_of(processes, [](const auto& each) { return each.second.is_lost; });
    }
  };

  // Locks `mutex_`. Waits in a BlockingScope, because its holder may wait for this pool's tasks.
  std::unique_lock<std::mutex> lock() const {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) return lock;
    const base::BlockingScope waits;
    lock.lock();
    return lock;
  }
  /// Marks, while the returned object exists, that `mutex_` is held for a long operation.
  auto mark_busy() const {
    busy_since_ = base::Clock::now();
    return c10::make_scope_exit([this] { busy_since_ = base::TimePoint{}; });
  }
  void check_participant(int participant, const Gradients& gradients) const {
    if (participant < 0 || participant >= options_.participants ||
        gradients.size() != parameters().size()) {
      base::invalid("a step of an unknown participant");
    }
  }
  static constexpr int kNobody = -1;
  int64_t slowest_locked(int but) const;
  template <class R, class Arguments, class Others, class Compute>
  base::Future<R> together(Gathering<R, Arguments>& gathering, Others& others,
                           const Arguments& arguments, Gradients gradients, const Compute& compute);
  template <class IsNeeded>
  std::optional<base::Error> left_error_locked(const IsNeeded& is_needed) const;
  template <class R, class Arguments>
  void fail_if_needed_left_locked(Gathering<R, Arguments>& gathering, base::DeferredTasks& done) {
    if (gathering.parts.empty()) return;
    const auto is_needed = [&](int other) { return !gathering.parts.contains(other); };
    const auto error = left_error_locked(is_needed);
    if (error) done.complete(std::exchange(gathering, {}).waiting, *error);
  }
  base::Future<uint64_t> step_alone(const StepOptions& options, const Gradients& gradients,
                                    rpc::ProcessNumber process);
  void apply_locked(const Gradients& gradients, const StepOptions& options);
  void stop_stepping_locked(rpc::ProcessNumber process, Participant::State state) {
    for (Participant& each : participants_) {
      if (each.has(process) && each.state == Participant::State::kStepping) each.state = state;
    }
  }
  int64_t lead_locked(int participant) const {
    return participants_[static_cast<size_t>(participant)].steps - slowest_locked(kNobody);
  }

  rpc::Agent& agent_;
  const UpdaterOptions options_;
  mutable std::mutex mutex_;
  mutable std::atomic<base::TimePoint> busy_since_{};  // time of mark_busy(); zero if not busy
  ParameterSet set_;
  const std::shared_ptr<std::atomic<uint64_t>> updates_;  // the rank's update count, or null
  uint64_t applied_ = 0;                                  // updates by this object
  std::vector<Participant> participants_;
  std::set<rpc::ProcessNumber> lost_processes_;
  Gathering<uint64_t, StepOptions> stepping_;
  Gathering<Norms, NormArguments> measuring_;
  struct WaitingStep {
    std::vector<base::Promise<uint64_t>> waiting;  // exactly one promise
    uint64_t updates;                              // the result of `waiting`
    base::TimePoint since;
  };
  void complete_waiting_steps_locked(base::DeferredTasks& done);
  std::multimap<int, WaitingStep> waiting_steps_;  // steps applied but not complete, by participant
  std::optional<base::Error> lost_;                // the first loss that ends waiting
};

}  // namespace distrain::optim
