#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "oracle/remote_ops.h"

namespace distrain::oracle {

/// A computation whose gradients are compared between runtimes. Its values are the same in each
/// call of graphs(). `leaves` and `table` require gradients.
struct Graph {
  std::string name;
  std::vector<at::Tensor> leaves;  ///< on the calling rank
  at::Tensor table;                ///< [10, 3], on the other rank, read by lookup()
  std::function<at::Tensor(RemoteOps&, const std::vector<at::Tensor>& leaves)> loss;
};

/// Returns all graphs: those that issue 3 requires, and variants of them.
std::vector<Graph> graphs();

/// Returns a copy of `graph` with its tensors on `device`.
Graph on_device(const Graph& graph, c10::Device device);

/// Returns the gradients of the leaves and, last, of the table, computed by plain autograd. A
/// gradient is undefined if the loss does not depend on its tensor.
std::vector<at::Tensor> local_gradients(const Graph& graph);

}  // namespace distrain::oracle
