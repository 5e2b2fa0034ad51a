// What the tests of our ResNets against torchvision's share.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "distrain/data/stored_tensors.h"
#include "distrain/models/resnet.h"
#include "support/catch.h"

namespace distrain::oracle {

using data::NamedTensors;
using models::ResNetStage;

inline void check_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance) {
  REQUIRE(actual.sizes() == expected.sizes());
  const double distance = (actual.detach() - expected).abs().max().item<double>();
  CHECK(distance <= tolerance);
}

// Then gradients can be compared to many digits: those of float32 differ by some percent with the
// order of every sum, through batch norm over few values and through ReLU.
inline void make_double(ResNetStage& net) {
  for (auto [name, tensor] : net.state()) {
    if (tensor.is_floating_point()) tensor.set_data(tensor.detach().to(at::kDouble));
  }
}

inline constexpr double kTolerance = 1e-4;
inline constexpr double kTrainingTolerance =
    1e-3;  // batch norm divides by what a batch happens to have
inline constexpr double kDoubleTolerance = 1e-6;  // of a tensor's norm

}  // namespace distrain::oracle
