#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "oracle/graphs.h"

namespace distrain::oracle {

/// Runs the graphs with PyTorch's distributed autograd (TensorPipeAgent and DistEngine), driven
/// from C++, in this process alone. The only worker calls itself. Every call uses a connection and
/// has send and recv nodes on both sides, as between two workers.
///
/// Only one may exist at a time, because torch's agent and contexts are globals.
class OfficialRuntime {
 public:
  OfficialRuntime();
  ~OfficialRuntime();
  OfficialRuntime(const OfficialRuntime&) = delete;
  OfficialRuntime& operator=(const OfficialRuntime&) = delete;

  /// Runs the graph and torch's distributed backward pass from its loss, in a new context. Returns
  /// the gradients of the leaves and, last, of the table. A missing gradient is undefined.
  std::vector<at::Tensor> gradients(const Graph& graph);

 private:
  class Ops;
  struct State;

  std::unique_ptr<State> state_;
};

}  // namespace distrain::oracle
