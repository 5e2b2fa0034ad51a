#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "cart_pole.h"

namespace distrain::scenario {

/// Where one of an observer's environments is.
struct EnvironmentState {
  uint32_t environment = 0;
  models::Observation observation{};
  double last_reward = 0;  ///< of the step that led here; 0 at an episode's beginning
  static constexpr auto kFields =
      std::tuple(&EnvironmentState::environment, &EnvironmentState::observation,
                 &EnvironmentState::last_reward);
};

/// The reward of the last step of an environment's episode.
struct FinalReward {
  uint32_t environment = 0;
  double reward = 0;
  static constexpr auto kFields = std::tuple(&FinalReward::environment, &FinalReward::reward);
};

/// One action for each state that was asked about.
using Actions = std::vector<int32_t>;

/// The environments of one observer. Not thread-safe.
class ObservedEnvironments {
 public:
  using SelectActions = std::function<Actions(const std::vector<EnvironmentState>&)>;
  using ReportRewards = std::function<void(const std::vector<FinalReward>&)>;

  /// `seed` is this observer's own. An episode ends after `max_steps` steps at the latest.
  ObservedEnvironments(uint64_t seed, int64_t count, int64_t max_steps)
      : seed_(seed), max_steps_(max_steps), environments_(static_cast<size_t>(count)) {}

  /// Plays an episode in each environment, side by side: at each step asks for the actions of all
  /// whose episode is not over yet; at the end reports the rewards that went with no question.
  void play(uint64_t episode, const SelectActions& select, const ReportRewards& report);

 private:
  const uint64_t seed_;
  const int64_t max_steps_;
  std::vector<CartPole> environments_;
};

}  // namespace distrain::scenario
