#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "support/catch.h"

namespace distrain::oracle {

/// Checks that the same elements of both lists are defined, and that corresponding gradients have
/// the same layout, size and type and differ by at most `tolerance` in every element.
inline void check_same_gradients(const std::vector<at::Tensor>& actual,
                                 const std::vector<at::Tensor>& expected, double tolerance = 1e-6) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    CAPTURE(i, actual[i], expected[i]);
    REQUIRE(actual[i].defined() == expected[i].defined());
    if (!actual[i].defined()) continue;
    REQUIRE(actual[i].layout() == expected[i].layout());
    REQUIRE(actual[i].sizes() == expected[i].sizes());
    REQUIRE(actual[i].scalar_type() == expected[i].scalar_type());
    const at::Tensor distance = (actual[i].to_dense() - expected[i].to_dense()).abs();
    REQUIRE(distance.max().item<double>() <= tolerance);
  }
}

}  // namespace distrain::oracle
