#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "distrain/job/definition.h"
#include "environment.h"
#include "policy.h"

namespace distrain::scenario {

/// Options of `distrain rl`. The defaults are those of the PyTorch tutorial. Steps are episodes.
struct RlOptions : job::CommonOptions, job::RuleOptions {
  RlOptions() {
    optimizer = "adam";
    checkpoint.every = 100;
  }
  static void describe(job::OptionList<RlOptions>& list);

  int observers = 1;
  int envs_per_observer = 1;
  double gamma = 0.99;        ///< discount factor per step
  int64_t max_steps = 10000;  ///< step limit per environment and episode
  double threshold = 475;     ///< the running reward above which CartPole is solved
  int64_t max_episodes = 0;   ///< 0: train until solved
};

/// A request for actions, with the states of one observer's environments.
struct ActionRequest {
  int observer = 0;          ///< from 0
  EnvironmentStates states;  ///< in ascending order of environments
};

/// Returns for each reward its sum with all later rewards, discounted by `gamma` per step.
std::vector<double> discounted_returns(const std::vector<double>& rewards, double gamma);
/// Normalises to mean 0 and sample deviation 1; a single value becomes 0.
void normalise(std::vector<double>& values);

/// The policy of a job and its training, in the `agent` rank or in the process of a `--local` job.
///
/// One thread begins and ends episodes; in between, any thread may call choose() and report().
class Learner {
 public:
  Learner(const RlOptions& options, c10::Device device, job::EventSink& sink);

  /// Adds the policy, its optimizer and the moving average of episode rewards to checkpoints.
  void keep_in(job::TrainingPlan& training);

  /// Starts episode number `episode`, from 1.
  void begin_episode(int64_t episode) {
    std::lock_guard lock(mutex_);
    for (Trajectory& each : trajectories_) each = {};
    if (now_.at == base::TimePoint{}) begun_.at = logged_.at = base::Clock::now();
    episode_ = episode;
  }
  /// Throws `invalid` if `request` is not valid for choose(): its observer is unknown, or one of
  /// its environments does not exist or occurs twice. Any thread may call it at any time.
  void check(const ActionRequest& request) const;
  /// Chooses actions by one forward pass for all requests, and records the data for the update. An
  /// observer must not send another request before it has received its actions.
  std::vector<Actions> choose(const std::vector<ActionRequest>& requests);
  /// Records the end states of an observer's episode.
  void report(int observer, const EnvironmentStates& ends) {
    std::lock_guard lock(mutex_);
    for (const EnvironmentState& end : ends) {
      trajectories_[place(observer, end.environment)].rewards.push_back(end.last_reward);
    }
  }
  /// Updates the policy and prints the `episode` line if due. Call it when all have reported.
  job::Result end_episode();

  bool solved() const { return running_reward() > options_.threshold; }
  /// Prints the last `episode` line if it was not printed, and adds the `end` line's fields to
  /// `fields`. `episodes` includes the episodes before a resume.
  void add_to(job::Json& fields, int64_t episodes);
  /// Returns the error message for a job that ends before solved() is true.
  std::string what_is_missing(int64_t episodes) const {
    return fmt::format("not solved after {} episodes: the running reward is {:.1f}, not above {:g}",
                       episodes, running_reward(), options_.threshold);
  }

  const Policy& policy() const { return policy_; }
  const job::SingleProcessOptimizer& optimizer() const { return optimizer_; }

 private:
  /// The current episode of one environment.
  struct Trajectory {
    std::vector<PolicyStep> steps;
    std::vector<double> rewards;
  };

  // Counts of this run up to the time `at`.
  struct Counts {
    int64_t steps = 0;  // of all environments
    int64_t requests = 0;
    std::chrono::steady_clock::time_point at{};
  };

  size_t place(int observer, uint32_t environment) const;
  at::Tensor learn();
  job::Json rates_since(const Counts& then) const;
  double running_reward() const { return running_reward_.item<double>(); }

  const RlOptions options_;
  job::StepLines lines_;
  Policy policy_;
  job::SingleProcessOptimizer optimizer_;
  int64_t episode_ = 0;              // number of the current or last episode
  double reward_ = 0;                // smallest reward of any environment in that episode
  const at::Tensor running_reward_;  // a tensor, because checkpoints keep only tensors

  std::mutex mutex_;  // guards the members below, which choose() and report() write
  std::vector<Trajectory> trajectories_;  // by observer, then by environment
  Counts begun_, logged_, now_;           // `logged_`: at the last `episode` line
  int64_t episode_steps_ = 0;
};

void train_rl(job::Rank& rank, const RlOptions& options);
void expose_rl(rpc::Agent& agent);
/// Trains in one process without RPC. The episodes equal those of train_rl() bit by bit.
void train_rl_local(job::SingleProcess& local, const RlOptions& options);
/// Plays episodes with the policy of a checkpoint, in environments not used in training.
void predict_rl(job::Predictions& predictions, const RlOptions& options);

}  // namespace distrain::scenario
