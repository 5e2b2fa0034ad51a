#pragma once

#include <c10/core/Device.h>

namespace distrain::testing {

/// Returns the device with this index for the suites of tests/sim that need nothing specific to the
/// simulated accelerator: a simulated device in the program `sim`, a GPU in the program `gpu`. With
/// fewer GPUs, several indices share one. A case that needs two different devices has the tag
/// [two].
c10::Device test_device(int index = 0);

}  // namespace distrain::testing
