#include "support/sim_device.h"
#include "support/test_device.h"

namespace distrain::testing {

c10::Device test_device(int index) { return sim(index); }

}  // namespace distrain::testing
