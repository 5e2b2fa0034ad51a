#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "distrain/base/random.h"

namespace distrain::scenario {

/// The state of an environment as the policy sees it: CartPole::State, rounded to float.
using Observation = std::array<float, 4>;

/// CartPole-v1: a pole on a cart that is pushed left (action 0) or right (1) with 10 N for 20 ms
/// per step. Each step has a reward of 1. An episode ends if the pole is more than 12 degrees from
/// upright or the cart is more than 2.4 m from the center, or after 500 steps.
///
/// The dynamics are from Barto, Sutton and Anderson (1983). Rounding errors grow fast, so this
/// class computes in Gymnasium's order: double precision, Euler's method.
class CartPole {
 public:
  /// Cart position in m, its velocity in m/s, pole angle in rad, its velocity in rad/s.
  using State = std::array<double, 4>;
  struct Step {
    Observation observation{};
    double reward = 0;
    bool terminated = false;  ///< the pole or the cart left its range
    bool truncated = false;   ///< the episode reached the step limit
    bool over() const { return terminated || truncated; }
  };

  /// Starts an episode from a random state near the center.
  Observation reset(base::Random random);
  Observation begin(const State& state) {
    state_ = state;
    steps_ = 0;
    return observation();
  }
  /// Makes one step. Do not call it after the end of the episode.
  Step step(int action);

 private:
  Observation observation() const {
    Observation rounded;
    for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = static_cast<float>(state_[i]);
    return rounded;
  }

  State state_{};
  int steps_ = 0;
};

/// The state of one environment of an observer.
struct EnvironmentState {
  uint32_t environment = 0;
  Observation observation{};
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
  /// not ended. Returns the end states and last rewards, which `select` did not get. The start of
  /// an episode depends only on seed, environment and `episode`, so a resumed job needs no
  /// generator state.
  EnvironmentStates play(int64_t episode,
                         const std::function<Actions(const EnvironmentStates&)>& select);

 private:
  const uint64_t seed_;
  const int64_t max_steps_;
  std::vector<CartPole> environments_;
};

}  // namespace distrain::scenario
