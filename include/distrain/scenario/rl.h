#pragma once

#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain rl`; the defaults are the PyTorch tutorial's. Steps are episodes.
struct RlOptions : job::CommonOptions, job::RuleOptions {
  RlOptions() {
    optimizer = "adam";
    checkpoint.every = 100;
  }
  static void describe(job::OptionList<RlOptions>& list);

  int observers = 1;
  int envs_per_observer = 1;
  double gamma = 0.99;        ///< by which a reward counts less for each step that it is away
  int64_t max_steps = 10000;  ///< of an environment in an episode
  double threshold = 475;     ///< CartPole is solved when the running reward is above it
  int64_t max_episodes = 0;   ///< 0: until it is solved
};

/// What the agent does.
void train_rl(job::Rank& rank, const RlOptions& options);
/// What agent and observers do for each other.
void expose_rl(rpc::Agent& agent);
/// The same training in one process without RPC: the same episodes to the last bit.
void train_rl_local(job::Local& local, const RlOptions& options);
/// Plays episodes with the policy of a checkpoint.
void predict_rl(job::Predictions& predictions, const RlOptions& options);

/// Rank 0 is the agent, ranks 1..N the observers. The goal is missed if it is not solved.
const job::Definition<RlOptions>& rl_job();

}  // namespace distrain::scenario
