#include <ATen/ATen.h>

#include "support/catch.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

at::Tensor values(at::ScalarType dtype, at::IntArrayRef sizes, int seed) {
  auto generator = at::detail::createCPUGenerator(uint64_t(seed) + 1);
  if (dtype == at::kBool) return at::randint(0, 2, sizes, generator).to(dtype);
  if (c10::isIntegralType(dtype, false)) return at::randint(0, 100, sizes, generator).to(dtype);
  return at::randn(sizes, generator, at::kDouble).to(dtype);
}

// Returns the reduction in rank order, computed serially with torch's arithmetic.
at::Tensor expected(ReduceOp op, const std::vector<at::Tensor>& inputs) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  const at::ScalarType wide = half ? at::kFloat : dtype;
  at::Tensor sum = inputs[0].to(wide);
  for (size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor next = inputs[i].to(wide);
    switch (op) {
      case ReduceOp::PRODUCT:
        sum = sum * next;
        break;
      case ReduceOp::MIN:
        sum = dtype == at::kBool ? sum.logical_and(next) : at::minimum(sum, next);
        break;
      case ReduceOp::MAX:
        sum = dtype == at::kBool ? sum.logical_or(next) : at::maximum(sum, next);
        break;
      default:
        sum = sum + next;
    }
  }
  if (op == ReduceOp::AVG) {
    if (at::isComplexType(dtype)) {
      at::view_as_real(sum).div_(double(inputs.size()));
    } else {
      // Divides by a tensor because torch may replace the division by a scalar by a multiplication.
      sum = sum / at::full_like(sum, double(inputs.size()));
    }
  }
  return sum.to(dtype);
}

void check_allreduce(TestGroup& group, ReduceOp op, const std::vector<at::Tensor>& inputs) {
  const int size = group.network.size();
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& input : inputs) outputs.push_back(input.clone());
  run_ranks(size, [&](int rank) { group[rank].allreduce(outputs[size_t(rank)], op).wait(); });
  const at::Tensor wanted = expected(op, inputs);
  for (int rank = 0; rank < size; ++rank) {
    INFO("rank " << rank << " of " << size << ", " << inputs[0].toString() << " "
                 << inputs[0].sizes());
    CHECK(same_bits(outputs[size_t(rank)], wanted));
  }
}

void check_allreduce(TestGroup& group, ReduceOp op, at::ScalarType dtype, at::IntArrayRef sizes) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < group.network.size(); ++rank) {
    inputs.push_back(values(dtype, sizes, rank));
  }
  check_allreduce(group, op, inputs);
}

}  // namespace

TEST_CASE("allreduce equals the serial sum in rank order, bit for bit") {
  const bool shared_memory = GENERATE(true, false);
  const int size = GENERATE(1, 2, 3, 4, 8);
  TestGroup group(size, {.shared_memory = shared_memory});
  // These counts are around 16 KiB and 64 KiB, above which allreduce works in chunks.
  for (int64_t count : {0, 1, 7, 4095, 4096, 4097, 16384, 16385, 1 << 18}) {
    check_allreduce(group, ReduceOp::SUM, at::kFloat, {count});
  }
}

TEST_CASE("allreduce works in chunks of any length") {
  const bool shared_memory = GENERATE(true, false);
  const int size = GENERATE(2, 3, 8);
  TestGroup group(size, {.direct_bytes = 0, .shared_memory = shared_memory});
  for (int64_t count : {1, 7, 15, 16, 17, 129, 1000}) {
    check_allreduce(group, ReduceOp::SUM, at::kFloat, {count});
    check_allreduce(group, ReduceOp::SUM, at::kByte, {count});
  }
}

TEST_CASE("allreduce works for every dtype") {
  const int64_t direct_bytes = GENERATE(1 << 20, 0);
  TestGroup group(GENERATE(3, 4), {.direct_bytes = direct_bytes});
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (auto op :
         {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
      check_allreduce(group, op, dtype, {1031});
    }
  }
  for (auto dtype : {at::kChar, at::kShort, at::kInt, at::kLong, at::kByte}) {
    for (auto op : {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
      check_allreduce(group, op, dtype, {1031});
    }
  }
  for (auto op : {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
    check_allreduce(group, op, at::kBool, {1031});
  }
  for (auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
    check_allreduce(group, op, at::kComplexFloat, {517});
    check_allreduce(group, op, at::kComplexDouble, {517});
  }
}

TEST_CASE("means have the bits of quotients at the limits of a dtype, too") {
  const int size = GENERATE(2, 3, 4, 8);
  TestGroup group(size);
  for (auto dtype : {at::kDouble, at::kFloat}) {
    // Around the least and the largest numbers; the sums of some of the latter overflow.
    const at::Tensor least = values(dtype, {600}, 0) * (dtype == at::kFloat ? 1e-44 : 1e-322);
    const at::Tensor largest = values(dtype, {600}, 1) * (dtype == at::kFloat ? 1e38 : 1e308);
    std::vector<at::Tensor> inputs;
    for (int rank = 0; rank < size; ++rank) inputs.push_back(at::cat({least, largest}).roll(rank));
    inputs[0].index_put_({0}, NAN);
    check_allreduce(group, ReduceOp::AVG, inputs);
  }
}

TEST_CASE("half-precision sums are accumulated in float32 and rounded once") {
  TestGroup group(4);
  // 2048 + 1 is not representable in half precision: rounding each sum would give 2048.
  run_ranks(4, [&](int rank) {
    const at::Tensor x = at::full({3}, rank == 0 ? 2048.0 : 1.0, at::kHalf);
    group[rank].allreduce(x).wait();
    RANK_CHECK(x[0].item<double>() == 2052.0);  // 2051, rounded to even
  });
}

TEST_CASE("min and max propagate a NaN of any rank") {
  const int where = GENERATE(0, 1, 2);
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    const at::Tensor x = at::full({2}, rank == where ? NAN : double(rank));
    const at::Tensor y = x.clone();
    group[rank].allreduce(x, ReduceOp::MIN).wait();
    group[rank].allreduce(y, ReduceOp::MAX).wait();
    RANK_CHECK(x.isnan().all().item<bool>());
    RANK_CHECK(y.isnan().all().item<bool>());
  });
}

TEST_CASE("allreduce works for tensors of any shape and strides") {
  const int64_t direct_bytes = GENERATE(1 << 20, 0);
  TestGroup group(3, {.direct_bytes = direct_bytes});
  check_allreduce(group, ReduceOp::SUM, at::kFloat, {});
  check_allreduce(group, ReduceOp::SUM, at::kFloat, {3, 0, 2});
  run_ranks(3, [&](int rank) {
    const at::Tensor whole = at::zeros({6, 8});
    const at::Tensor part = whole.t().slice(0, 1, 7, 2);  // not contiguous, with an offset
    part.fill_(double(rank + 1));
    group[rank].allreduce(part).wait();
    RANK_CHECK(part.eq(6).all().item<bool>());
    RANK_CHECK(whole.sum().item<double>() == 6.0 * double(part.numel()));
  });
}

TEST_CASE("allreduce accepts a tensor that requires a gradient") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    const at::Tensor parameter = at::ones({4}).set_requires_grad(true);
    group[rank].allreduce(parameter).wait();
    const at::Tensor strided = at::ones({4, 4}).t().set_requires_grad(true);
    group[rank].allreduce(strided).wait();
    RANK_CHECK(parameter.detach().eq(2).all().item<bool>());
    RANK_CHECK(strided.detach().eq(2).all().item<bool>());
  });
}

TEST_CASE("many operations may be in flight and be awaited in another order") {
  const bool shared_memory = GENERATE(true, false);
  const int size = GENERATE(2, 4);
  const uint32_t seed = GENERATE(1, 2, 3);
  TestGroup group(size, {.shared_memory = shared_memory}, seed);
  run_ranks(size, [&](int rank) {
    std::vector<at::Tensor> tensors;
    std::vector<collective::Pending> pending;
    for (int i = 0; i < 60; ++i) {
      const int64_t count = i % 3 == 0 ? 50000 : 17 * i;
      tensors.push_back(at::full({count}, double(rank + i)));
      pending.push_back(group[rank].allreduce(tensors.back()));
    }
    // A completed operation may have sends in flight. Overwriting its tensor must not affect them.
    for (int i = 59; i >= 0; --i) {
      pending[size_t(i)].wait();
      const double sum = size * i + size * (size - 1) / 2.0;
      RANK_CHECK(tensors[size_t(i)].eq(sum).all().item<bool>());
      tensors[size_t(i)].fill_(-1);
    }
  });
}

TEST_CASE("the order of arrival does not change the bits of the result") {
  std::optional<at::Tensor> first;
  for (uint32_t seed = 1; seed <= 5; ++seed) {
    TestGroup group(4, {}, seed);
    std::vector<at::Tensor> tensors;
    for (int rank = 0; rank < 4; ++rank) tensors.push_back(values(at::kFloat, {20000}, rank));
    run_ranks(4, [&](int rank) { group[rank].allreduce(tensors[size_t(rank)]).wait(); });
    if (!first) first = tensors[0];
    for (const at::Tensor& tensor : tensors) CHECK(same_bits(tensor, *first));
  }
}

TEST_CASE("a small and a large allreduce send the expected messages") {
  TestGroup group(4, {.shared_memory = false});
  run_ranks(4, [&](int rank) { group[rank].allreduce(at::ones({10})).wait(); });
  const size_t none_shared = 3;  // messages that tell the ranks to share no memory
  CHECK(group.network.messages() == none_shared + 4 * 3);
  run_ranks(4, [&](int rank) { group[rank].allreduce(at::ones({1 << 16})).wait(); });
  CHECK(group.network.messages() == none_shared + 4 * 3 + 2 * 4 * 3);
}
