#include <ATen/Functions.h>

#include "../src/app/process/process_setup.h"
#include "support/catch.h"

using namespace distrain;

TEST_CASE("large tensors reuse freed blocks") {
  app::reuse_tensor_memory();
  at::Tensor tensor = at::ones({1 << 20});
  const void* const block = tensor.data_ptr();
  tensor.reset();
  tensor = at::ones({900'000});  // the last batch of an epoch is smaller
  CHECK(tensor.data_ptr() == block);
  const at::Tensor another = at::ones({1 << 20});
  CHECK(another.data_ptr() != block);
  tensor.reset();
  const at::Tensor much_smaller = at::ones({100'000});
  CHECK(much_smaller.data_ptr() != block);
  CHECK(another.sum().item<float>() == 1 << 20);
}
