#pragma once

#include <array>

#include "distrain/base/random.h"

namespace distrain::scenario {

/// CartPole-v1: a pole on a cart that is pushed left (action 0) or right (1) with 10 N for 20 ms
/// per step. Each step has a reward of 1. An episode ends if the pole is over 12 degrees from
/// upright or the cart over 2.4 m from the center, or after 500 steps.
///
/// The dynamics are from Barto, Sutton and Anderson (1983). Rounding errors grow fast, so this
/// class computes in Gymnasium's order: double precision, Euler's method.
class CartPole {
 public:
  /// Cart position in m, its velocity in m/s, pole angle in rad, its velocity in rad/s.
  using State = std::array<double, 4>;
  /// A State rounded to float.
  using Observation = std::array<float, 4>;
  struct Step {
    Observation observation{};
    double reward = 0;
    bool terminated = false;  ///< the pole or the cart left its range
    bool truncated = false;   ///< the episode reached the step limit
    bool over() const { return terminated || truncated; }
  };

  /// Starts an episode from a random state near the center.
  Observation reset(base::Random random);
  /// Starts an episode from `state`.
  Observation begin(const State& state);
  /// Must not be called after the end of the episode.
  Step step(int action);

 private:
  Observation observation() const;

  State state_{};
  int steps_ = 0;
};

}  // namespace distrain::scenario
