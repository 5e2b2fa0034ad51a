#pragma once

#include <vector>

#include "distrain/rpc/channel.h"
#include "distrain/rpc/membership_types.h"

namespace distrain::rpc {

/// A component that is built on an agent and keeps state about other ranks, such as autograd
/// contexts or operations that wait for a rank. Registered with Agent::add_layer().
class Layer {
 public:
  virtual ~Layer() = default;
  /// Called once for each lost process of another rank, before any call of the rank's next process
  /// is run; when this agent ends, for each remaining rank, with `cancelled`. Releases the state
  /// kept for it and fails its waits with `loss.error`. Must be quick: one thread calls all layers.
  virtual void on_rank_lost(const Loss& loss) = 0;
  /// Called in Agent::shutdown() when this rank's calls have been answered. May call other ranks.
  virtual void on_shutdown() {}
  /// Returns current waits, for Agent::waits(). Called on any thread; must neither block nor throw.
  virtual std::vector<Wait> waits() const { return {}; }
};

}  // namespace distrain::rpc
