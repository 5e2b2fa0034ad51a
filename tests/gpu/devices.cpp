#include <exception>

#include "distrain/cuda/load.h"
#include "support/test_device.h"

namespace distrain::testing {
namespace {

// Runs before any test because LibTorch looks for CUDA once, at the first seed or backward pass.
[[maybe_unused]] const bool loaded = [] {
  try {
    cuda::load();
  } catch (const std::exception&) {  // the first test that needs a GPU reports it
  }
  return true;
}();

}  // namespace

c10::Device test_device(int index) {
  static const int count = cuda::load().device_count();
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index % count)};
}

}  // namespace distrain::testing
