#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "distrain/data/cart_pole.h"

namespace distrain::scenario {

/// Where one of an observer's environments is.
struct EnvironmentState {
  uint32_t environment = 0;
  data::CartPole::Observation observation{};
  double last_reward = 0;  ///< of the step that led here; 0 at an episode's beginning
  static constexpr auto kFields =
      std::tuple(&EnvironmentState::environment, &EnvironmentState::observation,
                 &EnvironmentState::last_reward);
};
using EnvironmentStates = std::vector<EnvironmentState>;

/// One action for each state that was asked about.
using Actions = std::vector<int32_t>;

/// The environments of one observer. Not thread-safe.
class Environments {
 public:
  /// `seed` is this observer's own. An episode ends after `max_steps` steps at the latest.
  Environments(uint64_t seed, int64_t count, int64_t max_steps)
      : seed_(seed), max_steps_(max_steps), environments_(static_cast<size_t>(count)) {}

  /// Plays an episode in each environment, side by side: at each step asks for the actions of all
  /// whose episode is not over yet; at the end reports where each ended, as the last rewards went
  /// with no question. Nothing but seed, environment and episode decides how one begins, so a job
  /// that goes on from a checkpoint needs no generator's state.
  void play(uint64_t episode, const std::function<Actions(const EnvironmentStates&)>& select,
            const std::function<void(const EnvironmentStates&)>& report);

 private:
  const uint64_t seed_;
  const int64_t max_steps_;
  std::vector<data::CartPole> environments_;
};

}  // namespace distrain::scenario
