#include <ATen/Functions.h>
#include <sanitizer/asan_interface.h>

#include "../src/app/process/process_setup.h"
#include "support/catch.h"

using namespace distrain;

namespace {

// Under AddressSanitizer, checks whether a use of the byte at `address` would be reported.
void check_poisoned(const void* address, bool is_poisoned) {
  CAPTURE(address, is_poisoned);
#ifdef __has_feature
#if __has_feature(address_sanitizer)
  CHECK((__asan_address_is_poisoned(address) != 0) == is_poisoned);
#endif
#endif
}

}  // namespace

TEST_CASE("large tensors reuse freed blocks") {
  app::reuse_tensor_memory();
  at::Tensor tensor = at::ones({1 << 20});
  const void* const block = tensor.data_ptr();
  tensor.reset();
  check_poisoned(block, true);
  tensor = at::ones({900'000});  // the last batch of an epoch is smaller
  CHECK(tensor.data_ptr() == block);
  check_poisoned(block, false);
  check_poisoned(tensor.data_ptr<float>() + tensor.numel(), true);
  const at::Tensor another = at::ones({1 << 20});
  CHECK(another.data_ptr() != block);
  tensor.reset();
  const at::Tensor much_smaller = at::ones({100'000});
  CHECK(much_smaller.data_ptr() != block);
  CHECK(another.sum().item<float>() == 1 << 20);
}
