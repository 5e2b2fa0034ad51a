#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include "distrain/base/error.h"

namespace distrain::cuda {

[[noreturn]] inline void fail(std::string message) {
  throw base::Exception(base::ErrorKind::kResources, std::move(message));
}

/// Throws if `result` is an error. `what` is the operation: "reading the GPU's name".
inline void check_cuda(cudaError_t result, const std::string& what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // otherwise torch would report this error for one of its kernels
  fail("CUDA failed " + what + ": " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) +
       ")");
}

}  // namespace distrain::cuda
