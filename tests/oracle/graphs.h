#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "oracle/remote_ops.h"

namespace distrain::oracle {

/// A graph on which gradients are compared, with the same values in every call of graphs().
/// `leaves` and `table` require gradients.
struct Graph {
  std::string name;
  std::vector<at::Tensor> leaves;  ///< on the calling rank
  at::Tensor table;                ///< the table of lookup(), on the other rank: [10, 3]
  std::function<at::Tensor(RemoteOps&, const std::vector<at::Tensor>& leaves)> loss;
};

/// Returns the graphs of issue 3 and variants of them.
std::vector<Graph> graphs();

/// Returns the graph with its values on a device.
Graph on_device(const Graph& graph, c10::Device device);

/// Returns the gradients of the leaves and, last, of the table, computed by plain autograd.
/// Undefined for a tensor that the loss does not depend on.
std::vector<at::Tensor> local_gradients(const Graph& graph);

}  // namespace distrain::oracle
