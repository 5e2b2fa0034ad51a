#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "distrain/job/local_training.h"
#include "distrain/models/policy.h"
#include "distrain/scenario/rl.h"
#include "environment.h"

namespace distrain::scenario {

/// The states of one observer's environments, whose actions are wanted.
struct ActionRequest {
  int observer = 0;          ///< from 0
  EnvironmentStates states;  ///< by environment, ascending
};

/// Rewards, each with what the later ones are worth discounted by `gamma` a step.
std::vector<double> discounted_returns(const std::vector<double>& rewards, double gamma);
/// To mean 0 and (sample) deviation 1; a single one becomes 0.
void normalise(std::vector<double>& values);

/// A job's policy and what is learned of its episodes: on the agent, or in `--local`'s process.
///
/// One thread begins and ends episodes; in between any thread may call choose() and report().
class Learner {
 public:
  Learner(const RlOptions& options, c10::Device device, job::EventSink& sink);

  /// What a checkpoint keeps of it.
  void keep_in(job::TrainingPlan& training);

  /// `episode`: its number, from 1.
  void begin_episode(int64_t episode);
  /// Throws `invalid` for a request that choose() must not be given: of no observer, or of an
  /// environment that it does not have or has twice. From any thread, at any time.
  void check(const ActionRequest& request) const;
  /// Actions by the policy, in one pass over all requests, and keeps what is needed to learn from
  /// them. An observer asks no more before it has its answer.
  std::vector<Actions> choose(const std::vector<ActionRequest>& requests);
  /// Where the episodes of an observer ended.
  void report(int observer, const EnvironmentStates& ends);
  /// Once all observers have reported: learns, and says so.
  job::Result end_episode();

  bool solved() const { return running_reward() > options_.threshold; }
  /// Ends the lines. For `end`, after so many episodes of this run and those before it.
  void add_to(job::Json& fields, int64_t episodes);
  /// Why the goal is missed.
  std::string what_is_missing(int64_t episodes) const;

  const models::Policy& policy() const { return policy_; }
  const job::LocalUpdates& updates() const { return updates_; }

 private:
  /// An environment's episode.
  struct Trajectory {
    std::vector<models::PolicyStep> steps;
    std::vector<double> rewards;
  };

  // In this run so far.
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
  models::Policy policy_;
  job::LocalUpdates updates_;
  int64_t episode_ = 0;              // that was begun last
  double reward_ = 0;                // of that episode, the smallest of all environments
  const at::Tensor running_reward_;  // a number, which a checkpoint keeps

  std::mutex mutex_;                      // of what choose() and report() write
  std::vector<Trajectory> trajectories_;  // of an observer's environments one after the other
  Counts begun_, logged_, now_;           // logged: at the last line
  int64_t episode_steps_ = 0;
};

}  // namespace distrain::scenario
