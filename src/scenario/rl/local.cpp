// distrain rl --local: the same episodes and updates in one process, without RPC.

#include "distrain/job/local_training.h"
#include "learner.h"
#include "observer.h"
#include "rl.h"

namespace distrain::scenario {

void train_rl_local(job::Local& local, const RlOptions& options) {
  Learner learner(options, local.device(), local.sink());
  std::vector<ObservedEnvironments> observers;
  for (int rank = 1; rank <= options.observers; ++rank) {
    observers.emplace_back(options.seed + static_cast<uint64_t>(rank), options.envs_per_observer,
                           options.max_steps);
  }
  job::LocalTraining training(local, job::Plan::of_steps(options, options.max_episodes), 1);
  learner.keep_in(training);
  training.end_when([&] { return learner.solved(); });
  training.run([&](const std::vector<job::Step>& steps) {
    const int64_t episode = steps[0].total + 1;
    learner.begin_episode(episode);
    // One after the other: no action depends on what is asked together with it.
    for (int o = 0; o < options.observers; ++o) {
      observers[static_cast<size_t>(o)].play(
          static_cast<uint64_t>(episode),
          [&learner, o](const std::vector<EnvironmentState>& states) {
            return learner.choose({{o, states}}).at(0);
          },
          [&learner, o](const std::vector<FinalReward>& rewards) { learner.report(o, rewards); });
    }
    return learner.end_episode();
  });
  learner.add_to(local.fields(), training.steps_made());
  if (!learner.solved()) local.miss_goal(learner.what_is_missing(training.steps_made()));
}

}  // namespace distrain::scenario
