#include "support/fake_device.h"
#include "support/test_device.h"

namespace distrain::testing {

c10::Device test_device(int index) { return fake(index); }

}  // namespace distrain::testing
