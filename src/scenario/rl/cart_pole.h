#pragma once

#include <array>

#include "environment.h"

namespace distrain::scenario {

/// CartPole-v1: a pole on a cart that is pushed to the left (action 0) or to the right (1), 10 N
/// for 20 ms a step. A step gives a reward of 1. The pole must stay within 12 degrees of upright
/// and the cart within 2.4 m of the middle; after 500 steps an episode ends anyhow.
///
/// The dynamics of Barto, Sutton and Anderson 1983 as Gymnasium computes them: in double, by
/// Euler's method, each expression in its order, because a pole makes a rounding error grow
/// fourfold in a third of a second.
class CartPole final : public Environment {
 public:
  static constexpr int kActions = 2;
  static constexpr int kMaxSteps = 500;

  models::Observation reset(const EpisodeKey& key) override;
  EnvironmentStep step(int action) override;

  /// x in m, its speed, the pole's angle in radians, its speed.
  using State = std::array<double, 4>;
  /// As reset(), but from here.
  void begin(const State& state);

 private:
  models::Observation observation() const;

  State state_{};
  int steps_ = 0;
};

}  // namespace distrain::scenario
