#pragma once

#include <c10/core/Device.h>

namespace distrain::testing {

/// Returns the device with this index for the suites of tests/fake_device that run on any device: a
/// fake device in the program `fake_device`, a GPU in the program `gpu`. If there are fewer GPUs,
/// several indices share a GPU. A case that needs two different devices has the tag
/// [two].
c10::Device test_device(int index = 0);

}  // namespace distrain::testing
