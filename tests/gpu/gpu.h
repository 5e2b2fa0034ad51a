#pragma once

#include <cstdlib>

#include "distrain/rpc/agent.h"
#include "support/cluster.h"
#include "support/test_device.h"

namespace distrain::testing {

/// Returns the first GPU; throws if there is none.
inline c10::Device gpu() { return test_device(0); }

/// Returns a cluster whose ranks share the first GPU.
inline Cluster gpu_cluster(int size, const Cluster::Setup& setup, rpc::AgentOptions options = {}) {
  options.device = gpu();
  return Cluster(size, setup, options);
}

/// Enqueues slow work on the current stream, so that a missing wait for later work there gives
/// wrong values. Does nothing on the CPU. DISTRAIN_GPU_BUSY sets the number of rows of the
/// matrices; tools that slow a GPU down need fewer.
inline void keep_busy(c10::Device device) {
  if (device.is_cpu()) return;
  const char* const told = std::getenv("DISTRAIN_GPU_BUSY");
  const int64_t size = told ? std::atoll(told) : 4096;
  at::Tensor square = at::rand({size, size}, at::device(device));
  for (int i = 0; i < 20; ++i) square = at::mm(square, square).tanh();
}

}  // namespace distrain::testing
