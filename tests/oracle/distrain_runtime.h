#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "oracle/graphs.h"
#include "support/cluster.h"

namespace distrain::oracle {

/// Our own distributed autograd on the graphs: ranks 0, which calls, and 1, "the other rank", in
/// one process; with a third rank, results of chain() stay on that one.
class DistrainRuntime {
 public:
  /// `each` as of Cluster.
  explicit DistrainRuntime(int world_size,
                           const std::function<void(rpc::AgentOptions&)>& each = {});
  ~DistrainRuntime();

  /// As OfficialRuntime::gradients(): those of the leaves and, last, of the table, from a context
  /// of their own; the table's is that of its owner.
  std::vector<at::Tensor> gradients(const Graph& graph);
  testing::Cluster& cluster() { return cluster_; }

 private:
  testing::Cluster cluster_;
};

}  // namespace distrain::oracle
