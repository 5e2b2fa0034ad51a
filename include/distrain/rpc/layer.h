#pragma once

#include <vector>

#include "distrain/base/error.h"
#include "distrain/rpc/channel.h"

namespace distrain::rpc {

/// What is built on an agent and keeps something of other ranks': contexts, steps, who waits for
/// whom. Known to the agent by Agent::add_layer.
class Layer {
 public:
  virtual ~Layer() = default;
  /// Rank `rank` is gone, with `error.kind` peer_lost or the reason that it gave: what is kept of
  /// it is let go of, and whoever waits for it hears `error`. Once for each rank, on a thread that
  /// all layers of the agent share, so it must be quick; when this agent ends, for all that are
  /// left, with `cancelled`. Must not throw.
  virtual void on_rank_lost(int rank, const base::Error& error) = 0;
  /// What it waits for now, for Agent::waits(). Any thread; must not wait itself, nor throw.
  virtual std::vector<Wait> waits() const { return {}; }
};

}  // namespace distrain::rpc
