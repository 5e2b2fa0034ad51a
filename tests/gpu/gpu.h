// What tests on a GPU begin with.
#pragma once

#include "distrain/cuda/load.h"
#include "distrain/rpc/agent.h"
#include "support/cluster.h"

namespace distrain::testing {

/// The first GPU; throws where there is none.
inline c10::Device gpu() {
  static const int count = cuda::load().device_count();
  return count > 0 ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU);
}

/// Ranks that share the first GPU.
inline Cluster gpu_cluster(int size, const Cluster::Setup& setup, rpc::AgentOptions options = {}) {
  options.device = gpu();
  return Cluster(size, setup, options);
}

/// Some work that takes a while in the current stream: what is computed behind it is not there yet
/// when the call that asked for it returns.
inline void keep_busy(c10::Device device) {
  at::Tensor square = at::rand({4096, 4096}, at::device(device));
  for (int i = 0; i < 20; ++i) square = at::mm(square, square).tanh();
}

}  // namespace distrain::testing
