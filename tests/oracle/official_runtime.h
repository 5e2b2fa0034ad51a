#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "oracle/graphs.h"

namespace distrain::oracle {

/// PyTorch's own distributed autograd (TensorPipeAgent and DistEngine), driven from C++, in this
/// process alone: its one worker calls itself, and every call goes over a connection, with a send
/// and a recv node on either side, as between two workers.
///
/// torch's agent and contexts are globals: at most one OfficialRuntime at a time.
class OfficialRuntime {
 public:
  OfficialRuntime();
  ~OfficialRuntime();
  OfficialRuntime(const OfficialRuntime&) = delete;
  OfficialRuntime& operator=(const OfficialRuntime&) = delete;

  /// Runs the graph in a new context, then torch's distributed backward pass from its loss. The
  /// gradients of the leaves and, last, of the table, in that context; an undefined tensor where
  /// there is none. Those of the table come from the same context: it is this process's only one.
  std::vector<at::Tensor> gradients(const Graph& graph);

 private:
  class Ops;
  struct State;

  std::unique_ptr<State> state_;
};

}  // namespace distrain::oracle
