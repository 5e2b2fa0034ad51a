#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "cart_pole.h"

namespace distrain::scenario {

/// The state of one environment of an observer.
struct EnvironmentState {
  uint32_t environment = 0;
  CartPole::Observation observation{};
  double last_reward = 0;  ///< reward of the last step; 0 at the start of an episode
  static constexpr auto kFields =
      std::tuple(&EnvironmentState::environment, &EnvironmentState::observation,
                 &EnvironmentState::last_reward);
};
using EnvironmentStates = std::vector<EnvironmentState>;

/// One action for each state of a request.
using Actions = std::vector<int32_t>;

/// The environments of one observer. Not thread-safe.
class Environments {
 public:
  /// `seed` must differ between observers. An episode ends after at most `max_steps` steps.
  Environments(uint64_t seed, int64_t count, int64_t max_steps)
      : seed_(seed), max_steps_(max_steps), environments_(static_cast<size_t>(count)) {}

  /// Plays one episode in each environment. Each step calls `select` for the environments that have
  /// not ended; finally `report` gets the end states with the last rewards, which no request
  /// carried. The start of an episode depends only on seed, environment and `episode`, so a resumed
  /// job needs no generator state.
  void play(uint64_t episode, const std::function<Actions(const EnvironmentStates&)>& select,
            const std::function<void(const EnvironmentStates&)>& report);

 private:
  const uint64_t seed_;
  const int64_t max_steps_;
  std::vector<CartPole> environments_;
};

}  // namespace distrain::scenario
