#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "oracle/graphs.h"
#include "support/cluster.h"

namespace distrain::oracle {

/// Runs the graphs with our distributed autograd: rank 0 is the caller and rank 1 "the other rank",
/// both in one process. With a third rank, results of chain() stay on that rank.
class DistrainRuntime {
 public:
  /// `each` may change the options of each rank before its agent is created.
  explicit DistrainRuntime(int world_size,
                           const std::function<void(rpc::AgentOptions&)>& each = {});
  ~DistrainRuntime();

  /// As OfficialRuntime::gradients(): returns the gradients of the leaves and, last, of the table,
  /// from a new context. The table's gradient is read on its owner.
  std::vector<at::Tensor> gradients(const Graph& graph);
  testing::Cluster& cluster() { return cluster_; }

 private:
  testing::Cluster cluster_;
};

}  // namespace distrain::oracle
