#pragma once

#include "distrain/job/definition.h"

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
  int64_t max_steps = 10000;  ///< per environment and episode
  double threshold = 475;     ///< the running reward above which CartPole is solved
  int64_t max_episodes = 0;   ///< 0: train until solved
};

void train_rl(job::Rank& rank, const RlOptions& options);
void expose_rl(rpc::Agent& agent);
/// Trains in one process without RPC, with bit-identical episodes.
void train_rl_local(job::SingleProcess& local, const RlOptions& options);
/// Plays episodes with the policy of a checkpoint.
void predict_rl(job::Predictions& predictions, const RlOptions& options);

}  // namespace distrain::scenario
