// distrain rl in one process without RPC (--local, with the same episodes and updates), and
// predict, which plays in environments that were not used in training.

#include "distrain/base/error.h"
#include "distrain/job/training.h"
#include "environment.h"
#include "learner.h"

namespace distrain::scenario {

void train_rl_local(job::SingleProcess& local, const RlOptions& options) {
  Learner learner(options, local.device(), local.sink());
  std::vector<Environments> observers;
  for (int rank = 1; rank <= options.observers; ++rank) {
    observers.emplace_back(options.seed + static_cast<uint64_t>(rank), options.envs_per_observer,
                           options.max_steps);
  }
  job::SingleProcessTraining training(
      local, job::Plan::of_steps(options, options.max_episodes, "--max-episodes"), 1);
  learner.keep_in(training);
  training.end_when([&] { return learner.solved(); });
  training.run([&](const std::vector<job::Step>& steps) {
    const int64_t episode = steps[0].total + 1;
    learner.begin_episode(episode);
    // The observers may play in turn, because no action depends on other requests in its pass.
    for (int o = 0; o < options.observers; ++o) {
      observers[static_cast<size_t>(o)].play(
          static_cast<uint64_t>(episode),
          [&](const EnvironmentStates& states) {
            return learner.choose({{o, states}}).at(0);
          },
          [&](const EnvironmentStates& ends) { learner.report(o, ends); });
    }
    return learner.end_episode();
  });
  learner.add_to(local.fields(), training.steps_made());
  if (!learner.solved()) local.miss_goal(learner.what_is_missing(training.steps_made()));
}

void predict_rl(job::Predictions& predictions, const RlOptions& options) {
  if (predictions.input() != job::kStandardInput) {
    base::invalid("predict takes no FILE for rl, because it plays episodes");
  }
  constexpr int64_t kEpisodes = 10;
  const int64_t episodes = options.max_episodes > 0 ? options.max_episodes : kEpisodes;
  Policy policy(options.seed, predictions.device());
  predictions.load(policy.named_parameters());
  Environments environment(options.seed, 1, options.max_steps);  // training uses seed + rank
  double total = 0;
  for (int64_t episode = 1; episode <= episodes; ++episode) {
    double reward = 0;
    int64_t steps = 0;
    environment.play(
        static_cast<uint64_t>(episode),
        [&](const EnvironmentStates& states) {
          ++steps;
          reward += states[0].last_reward;
          return Actions{policy.best(states[0].observation)};
        },
        [&](const EnvironmentStates& ends) { reward += ends[0].last_reward; });
    predictions.tell({{"reward", reward}, {"steps", steps}});
    total += reward;
  }
  predictions.add("reward", total / static_cast<double>(episodes));
}

}  // namespace distrain::scenario
