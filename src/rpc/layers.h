#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "distrain/base/executor.h"
#include "distrain/rpc/layer.h"

namespace distrain::rpc {

/// The layers that are built on an agent. Thread-safe.
class Layers {
 public:
  explicit Layers(base::Executor& executor) : executor_(executor) {}

  /// It is told of losses, earlier ones included.
  void add(const std::weak_ptr<Layer>& layer);
  /// Once for each rank: one that was lost is not lost again as its agent ends.
  void on_rank_lost(int rank, const base::Error& error);
  std::vector<Wait> waits() const;

 private:
  std::vector<std::shared_ptr<Layer>> living_locked() const;

  base::Executor& executor_;
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Layer>> layers_;
  std::vector<std::pair<int, base::Error>> losses_;
};

}  // namespace distrain::rpc
