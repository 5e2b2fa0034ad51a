#pragma once

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

/// A world that an agent acts in, one episode after the other. After Gymnasium's `Env`.
class Environment {
 public:
  virtual ~Environment() = default;
  /// Begins an episode.
  virtual models::Observation reset(const EpisodeKey& key) = 0;
  /// Not after the episode is over.
  virtual EnvironmentStep step(int action) = 0;
};

}  // namespace distrain::scenario
