#pragma once

#include <c10/core/Device.h>

namespace distrain::testing {

/// The device with this number that the suites of tests/sim run on, if they need nothing that only
/// the simulated accelerator has: one of that in the program `sim`, a GPU in the program `gpu`,
/// where fewer GPUs are taken in turn. A case that needs two that differ has the tag [two].
c10::Device test_device(int index = 0);

}  // namespace distrain::testing
