// distrain predict, of a checkpoint of rl: the policy plays episodes, in worlds that it did not
// learn in.

#include "distrain/base/error.h"
#include "distrain/models/policy.h"
#include "observer.h"
#include "rl.h"

namespace distrain::scenario {

void predict_rl(job::Predictions& predictions, const RlOptions& options) {
  if (predictions.input() != job::kStandardInput) {
    throw base::Exception(base::ErrorKind::kInvalid, "predict reads no file for rl: it plays");
  }
  constexpr int64_t kEpisodes = 10;
  const int64_t episodes = options.max_episodes > 0 ? options.max_episodes : kEpisodes;
  models::Policy policy(options.seed, predictions.device());
  predictions.load(policy.named_parameters());
  ObservedEnvironments environment(options.seed, 1,
                                   options.max_steps);  // observers have seed + rank
  double total = 0;
  for (int64_t episode = 1; episode <= episodes; ++episode) {
    double reward = 0;
    int64_t steps = 0;
    environment.play(
        static_cast<uint64_t>(episode),
        [&](const std::vector<EnvironmentState>& states) {
          ++steps;
          reward += states[0].last_reward;
          return Actions{policy.best(states[0].observation)};
        },
        [&](const std::vector<FinalReward>& rewards) { reward += rewards[0].reward; });
    predictions.tell({{"reward", reward}, {"steps", steps}});
    total += reward;
  }
  predictions.add("reward", total / static_cast<double>(episodes));
}

}  // namespace distrain::scenario
