#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include "distrain/base/error.h"

namespace distrain::cuda {

[[noreturn]] inline void fail(std::string message) {
  throw base::Exception(base::ErrorKind::kResources, std::move(message));
}

/// `what` is what was being done: "reading the GPU's name".
inline void check_cuda(cudaError_t result, const std::string& what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // torch would find it later, and blame a kernel of its own
  fail("CUDA failed " + what + ": " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) +
       ")");
}

}  // namespace distrain::cuda
