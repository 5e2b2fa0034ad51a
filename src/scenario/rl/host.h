#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "distrain/job/checkpoints.h"
#include "distrain/models/policy.h"
#include "distrain/optim/update_rule.h"
#include "distrain/scenario/rl.h"
#include "observer.h"

namespace distrain::scenario {

/// The states of one observer's environments, whose actions are wanted.
struct ActionRequest {
  int observer = 0;                      ///< from 0
  std::vector<EnvironmentState> states;  ///< by environment, ascending
};

/// Rewards, each with what the later ones are worth discounted by `gamma` a step.
std::vector<double> discounted_returns(const std::vector<double>& rewards, double gamma);
/// To mean 0 and (sample) deviation 1; a single one becomes 0.
void normalise(std::vector<double>& values);

/// The policy of a job and what is learned of its episodes: held by the agent, or by the one
/// process of `--local`.
///
/// One thread begins and ends the episodes. In between, choose() and report() may be called from
/// any thread.
class RlHost {
 public:
  /// Tries whether the folder of checkpoints can be written, and is this job's.
  RlHost(const RlOptions& options, const job::Job& job, job::EventSink& sink);

  /// Before the first episode: goes on from a checkpoint if there is one to go on from. Throws
  /// `bad_data` if it does not fit.
  void start();

  enum class State {
    kTraining,
    kSolved,
    kMissed,   ///< as many episodes as there may be, and not solved
    kStopped,  ///< by a signal
  };
  State state() const { return state_; }

  /// The number of the episode that begins, from 1. Only while training.
  int64_t begin_episode();
  /// Throws `invalid` for a request that choose() must not be given: of no observer, or of an
  /// environment that it does not have or has twice. From any thread, at any time.
  void check(const ActionRequest& request) const;
  /// Actions by the policy, in one pass over all requests, and keeps what is needed to learn from
  /// them. An observer asks no more before it has its answer.
  std::vector<Actions> choose(const std::vector<ActionRequest>& requests);
  /// At the end of an observer's episode.
  void report(int observer, const std::vector<FinalReward>& rewards);
  /// Once all observers have reported: learns, says so, saves. `stop`: an observer was told to.
  void end_episode(bool stop);

  /// Some rank was told to stop, in time or too late for it to matter.
  bool stopped() const { return stopped_ || stop_->requested(); }
  void add_to(job::Outcome& outcome) const;

 private:
  /// An environment's episode.
  struct Trajectory {
    std::vector<models::PolicyStep> steps;
    std::vector<double> rewards;
  };

  void check(int observer, uint32_t environment) const;
  Trajectory& trajectory(int observer, uint32_t environment);
  void learn();
  void log();
  void set_state();
  job::Json must_agree() const;
  void resume(const job::Snapshot& snapshot);
  void save();

  const RlOptions options_;
  job::EventSink& sink_;
  const std::shared_ptr<job::StopSignal> stop_;
  job::Checkpoints checkpoints_;
  models::Policy policy_;
  const std::unique_ptr<optim::UpdateRule> rule_;
  const job::OptimizerAccess optimizer_;
  State state_ = State::kTraining;
  bool stopped_ = false;  // an observer was
  int64_t episode_ = 0;   // that was begun last
  double reward_ = 0;     // of that episode, the smallest of all environments
  double running_reward_ = 0;

  std::mutex mutex_;  // of what choose() and report() write
  std::vector<Trajectory> trajectories_;
  int64_t requests_ = 0;

  // In this run, and up to the last line.
  struct Counts {
    int64_t steps = 0;  // of all environments
    int64_t requests = 0;
    std::chrono::steady_clock::time_point at{};
  };
  Counts begun_, logged_, now_;
  int64_t episode_steps_ = 0;
};

}  // namespace distrain::scenario
