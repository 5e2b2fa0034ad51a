#pragma once

#include <array>
#include <cstdint>

#include "distrain/models/policy.h"

namespace distrain::scenario {

/// What an episode's beginning is drawn from. Nothing else decides it, so a job that goes on from a
/// checkpoint needs no generator's state.
struct EpisodeKey {
  uint64_t seed = 0;  ///< of the observer
  uint64_t environment = 0;
  uint64_t episode = 0;
};

struct EnvironmentStep {
  models::Observation observation{};
  double reward = 0;
  bool terminated = false;  ///< the episode is over by the rules
  bool truncated = false;   ///< or by the limit of steps
  bool over() const { return terminated || truncated; }
};

/// CartPole-v1: a pole on a cart that is pushed to the left (action 0) or to the right (1), 10 N
/// for 20 ms a step. A step gives a reward of 1. The pole must stay within 12 degrees of upright
/// and the cart within 2.4 m of the middle; after 500 steps an episode ends anyhow.
///
/// The dynamics of Barto, Sutton and Anderson 1983 as Gymnasium computes them: in double, by
/// Euler's method, each expression in its order, because a pole makes a rounding error grow
/// fourfold in a third of a second.
class CartPole {
 public:
  /// Begins an episode.
  models::Observation reset(const EpisodeKey& key);
  /// Not after the episode is over.
  EnvironmentStep step(int action);

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
