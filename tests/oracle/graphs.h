#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "oracle/remote_ops.h"

namespace distrain::oracle {

/// One graph to compare gradients on. `leaves` and `table` require gradients; the same numbers in
/// every call of graphs().
struct Graph {
  std::string name;
  std::vector<at::Tensor> leaves;  ///< of the rank that calls
  at::Tensor table;                ///< what lookup() reads, on the other rank: [10, 3]
  std::function<at::Tensor(RemoteOps&, const std::vector<at::Tensor>& leaves)> loss;
};

/// The graphs of issue 3 and their relatives.
std::vector<Graph> graphs();

/// The same numbers on a device.
Graph on_device(const Graph& graph, c10::Device device);

/// The gradients of the leaves and, last, of the table, by plain autograd; undefined where a tensor
/// has no part in the loss.
std::vector<at::Tensor> local_gradients(const Graph& graph);

}  // namespace distrain::oracle
