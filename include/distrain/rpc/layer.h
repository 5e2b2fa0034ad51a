#pragma once

#include <vector>

#include "distrain/rpc/channel.h"
#include "distrain/rpc/incarnation.h"

namespace distrain::rpc {

/// What is built on an agent and keeps something of other ranks': contexts, steps, who waits for
/// whom. Known to the agent by Agent::add_layer.
class Layer {
 public:
  virtual ~Layer() = default;
  /// A rank is gone: what is kept of it is let go of, and whoever waits for it hears `loss.error`.
  /// Once for each of its processes, before any call of the next one is run. On a thread of all
  /// layers, so it must be quick; when this agent ends, for all left, with `cancelled`.
  virtual void on_rank_lost(const Loss& loss) = 0;
  /// This rank has entered Agent::shutdown(), and its calls have been answered. On the thread of
  /// shutdown(), which waits for it; it may call others, which still serve.
  virtual void on_shutdown() {}
  /// What it waits for now, for Agent::waits(). Any thread; must not wait itself, nor throw.
  virtual std::vector<Wait> waits() const { return {}; }
};

}  // namespace distrain::rpc
