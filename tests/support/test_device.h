#pragma once

#include <c10/core/Device.h>

namespace distrain::testing {

/// Returns device number `index`: a fake device in the program `fake_device`, a GPU in the program
/// `gpu`. Several indices share a GPU if there are too few GPUs. Test cases that need two different
/// devices have the tag [two].
c10::Device test_device(int index = 0);

}  // namespace distrain::testing
