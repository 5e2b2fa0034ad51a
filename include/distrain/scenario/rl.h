#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "distrain/job/checkpoint_options.h"
#include "distrain/job/job.h"

namespace distrain::scenario {

/// Options of `distrain rl`; the defaults are the PyTorch tutorial's.
struct RlOptions {
  int observers = 1;
  int envs_per_observer = 1;
  double gamma = 0.99;  ///< by which a reward counts less for each step that it is away
  double lr = 0.01;
  int64_t max_steps = 10000;  ///< of an environment in an episode
  double threshold = 475;     ///< CartPole is solved when the running reward is above it
  int64_t max_episodes = 0;   ///< 0: until it is solved
  uint64_t seed = 1;
  int threads = 0;                         ///< as told in `start`: rl computes on one
  int log_interval = 10;                   ///< episodes; 0: no lines
  job::CheckpointOptions checkpoint = {};  ///< `every` is in episodes; 0: at the end only
};

/// Rank 0 is the agent, ranks 1..N the observers.
int rl_world_size(const RlOptions& options);
std::string rl_role(int rank);

/// Runs one rank of the job to its end; throws base::Exception. `adopt` turns rank 0's options into
/// an RlOptions. Rank 0's Outcome says whether the goal was missed.
job::Outcome run_rl(const RlOptions& own, const job::Job& job,
                    const std::function<RlOptions(const job::OptionMap&)>& adopt,
                    job::EventSink& sink);

/// The same training in one process without RPC: the same episodes to the last bit.
job::Outcome run_rl_local(const RlOptions& options, const job::Job& job, job::EventSink& sink);

}  // namespace distrain::scenario
