// What tests on a GPU begin with.
#pragma once

#include <cstdlib>

#include "distrain/rpc/agent.h"
#include "support/cluster.h"
#include "support/test_device.h"

namespace distrain::testing {

/// The first GPU; throws where there is none.
inline c10::Device gpu() { return test_device(0); }

/// Ranks that share the first GPU.
inline Cluster gpu_cluster(int size, const Cluster::Setup& setup, rpc::AgentOptions options = {}) {
  options.device = gpu();
  return Cluster(size, setup, options);
}

/// Some work that takes a while in the current stream: what is computed behind it is not there yet
/// when the call that asked for it returns. None on the CPU, which is through with it by then.
/// DISTRAIN_GPU_BUSY: rows of the matrices, fewer for tools that make a GPU slow.
inline void keep_busy(c10::Device device) {
  if (device.is_cpu()) return;
  const char* const told = std::getenv("DISTRAIN_GPU_BUSY");
  const int64_t size = told ? std::atoll(told) : 4096;
  at::Tensor square = at::rand({size, size}, at::device(device));
  for (int i = 0; i < 20; ++i) square = at::mm(square, square).tanh();
}

}  // namespace distrain::testing
