#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "oracle/graphs.h"
#include "support/cluster.h"

namespace distrain::oracle {

/// Runs the graphs with our distributed autograd, on ranks in one process. Rank 0 is the caller and
/// rank 1 is "the other rank" of RemoteOps. If there is a third rank, it keeps results of chain().
class DistrainRuntime {
 public:
  /// `each` may change the options of each rank before its agent is created.
  explicit DistrainRuntime(int world_size,
                           const std::function<void(rpc::AgentOptions&)>& each = {});
  ~DistrainRuntime();

  /// Runs a pass in a new context. Returns the gradients of the leaves and, last, of the table.
  std::vector<at::Tensor> gradients(const Graph& graph);
  testing::Cluster& cluster() { return cluster_; }

 private:
  testing::Cluster cluster_;
};

}  // namespace distrain::oracle
