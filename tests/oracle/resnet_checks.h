// Shared helpers of the tests that compare our ResNets with torchvision's.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "distrain/store/safetensors.h"
#include "scenario/pipeline/resnet.h"
#include "support/catch.h"

namespace distrain::oracle {

using rpc::NamedTensors;
using scenario::ResNetStage;

inline void check_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance) {
  REQUIRE(actual.sizes() == expected.sizes());
  const double distance = (actual.detach() - expected).abs().max().item<double>();
  CHECK(distance <= tolerance);
}

// Converts the net to double, so that tests can compare many digits of gradients. In float32, the
// order of a sum changes gradients by some percent: small batches and ReLU amplify rounding.
inline void make_double(ResNetStage& net) {
  for (auto [name, tensor] : net.state()) {
    if (tensor.is_floating_point()) tensor.set_data(tensor.detach().to(at::kDouble));
  }
}

inline constexpr double kTolerance = 1e-4;
inline constexpr double kTrainingTolerance = 1e-3;  // batch norm amplifies rounding errors
inline constexpr double kDoubleTolerance = 1e-6;    // relative to a tensor's norm

}  // namespace distrain::oracle
