#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "distrain/base/serial_thread.h"
#include "distrain/rpc/layer.h"

namespace distrain::rpc {

/// The layers that are built on an agent. Thread-safe.
class Layers {
 public:
  /// It is told of losses, earlier ones included.
  void add(const std::weak_ptr<Layer>& layer);
  /// Once for each rank: one that was lost is not lost again as its agent ends.
  void on_rank_lost(int rank, const base::Error& error);
  /// Returns when the layers have been told of all losses so far.
  void wait_until_told();
  /// Whether this thread is the one that tells them.
  bool tells_here() const { return teller_.runs_here(); }
  std::vector<Wait> waits() const;

 private:
  std::vector<std::shared_ptr<Layer>> living_locked() const;

  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Layer>> layers_;
  std::vector<std::pair<int, base::Error>> losses_;
  base::SerialThread teller_{"dt-lost"};  // the workers may all be busy
};

}  // namespace distrain::rpc
