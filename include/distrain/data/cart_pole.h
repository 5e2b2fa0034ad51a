#pragma once

#include <array>

#include "distrain/base/random.h"

namespace distrain::data {

/// CartPole-v1: a pole on a cart that is pushed to the left (action 0) or to the right (1), 10 N
/// for 20 ms a step. A step gives a reward of 1. The pole must stay within 12 degrees of upright
/// and the cart within 2.4 m of the middle; after 500 steps an episode ends anyhow.
///
/// The dynamics of Barto, Sutton and Anderson 1983 as Gymnasium computes them: in double, by
/// Euler's method, each expression in its order: rounding errors grow fast.
class CartPole {
 public:
  /// x in m, its speed, the pole's angle in radians, its speed.
  using State = std::array<double, 4>;
  /// The same, rounded.
  using Observation = std::array<float, 4>;
  struct Step {
    Observation observation{};
    double reward = 0;
    bool terminated = false;  ///< the episode is over by the rules
    bool truncated = false;   ///< or by the limit of steps
    bool over() const { return terminated || truncated; }
  };

  /// Begins an episode, near the middle.
  Observation reset(base::Random random);
  /// The same, from here.
  Observation begin(const State& state);
  /// Not after the episode is over.
  Step step(int action);

 private:
  Observation observation() const;

  State state_{};
  int steps_ = 0;
};

}  // namespace distrain::data
