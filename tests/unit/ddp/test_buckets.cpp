#include <ATen/ATen.h>

#include "../src/ddp/buckets.h"
#include "support/catch.h"

using namespace distrain;
using Lists = std::vector<std::vector<size_t>>;

TEST_CASE("buckets are divided by bytes and dtype") {
  const std::vector<at::Tensor> parameters = {at::empty({10}), at::empty({10}, at::kDouble),
                                              at::empty({10}), at::empty({100}),
                                              at::empty({10}), at::empty({0})};
  CHECK(ddp::assign_buckets(parameters, {5, 4, 3, 2, 1, 0}, 1000, 1000) ==
        Lists{{1}, {5, 4, 3, 2, 0}});
  CHECK(ddp::assign_buckets(parameters, {5, 4, 3, 2, 1, 0}, 40, 80) ==
        Lists{{5, 4}, {3}, {1}, {2, 0}});
  CHECK(ddp::assign_buckets(parameters, {0, 1, 2, 3}, 1, 1) == Lists{{0}, {1}, {2}, {3}});
  CHECK(ddp::assign_buckets({}, {}, 1, 1).empty());
}

TEST_CASE("a bucket whose gradients are in use allocates new memory") {
  const std::vector<at::Tensor> parameters = {at::empty({2, 3}), at::empty({4})};
  ddp::Bucket bucket({1, 0}, parameters);
  bucket.begin();
  const void* memory = bucket.flat().data_ptr();
  bucket.store(0, at::ones({4}));
  CHECK_FALSE(bucket.complete());
  bucket.store(1, at::full({3, 2}, 2.0).t());
  CHECK(bucket.complete());
  CHECK(bucket.flat().sum().item<double>() == 16);
  bucket.begin();
  CHECK(bucket.flat().data_ptr() == memory);
  CHECK_FALSE(bucket.complete());
  {
    const at::Tensor kept = bucket.view(1).detach();
    bucket.begin();
    CHECK(bucket.flat().data_ptr() != memory);
  }
  const at::Tensor kept = bucket.view(0);
  const void* second = bucket.flat().data_ptr();
  bucket.begin();
  CHECK(bucket.flat().data_ptr() != second);
}
