// Lets a test program reuse the memory of large tensors, as distrain does. AddressSanitizer's own
// allocator maps and unmaps each large tensor, which took a third of the time of the tests of jobs.
#include "../src/app/process/process_setup.h"

namespace distrain::testing {
namespace {

[[maybe_unused]] const bool reuses_tensor_memory = (app::reuse_tensor_memory(), true);

}  // namespace
}  // namespace distrain::testing
