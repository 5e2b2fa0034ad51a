// Tests that reductions of halves have the bits of scalar code with c10's conversions.
#include <cmath>
#include <random>

#include "../src/collective/operations.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

// Returns each half once, in a random order, and a few more, so that the last vector is not full.
template <class T>
std::vector<T> all_values(uint32_t seed) {
  std::vector<T> values;
  for (int bits = 0; bits <= UINT16_MAX; ++bits) {
    values.emplace_back(static_cast<uint16_t>(bits), T::from_bits());
  }
  std::shuffle(values.begin(), values.end(), std::mt19937(seed));
  for (size_t i = 0; i < 5; ++i) values.push_back(values[i]);
  return values;
}

template <class T>
T reduced(ReduceOp op, const std::vector<std::vector<T>>& inputs, size_t i) {
  float sum = inputs[0][i];
  for (size_t k = 1; k < inputs.size(); ++k) {
    const float x = inputs[k][i];
    if (op == ReduceOp::PRODUCT)
      sum *= x;
    else if (op == ReduceOp::MIN)
      sum = std::isnan(sum) || sum < x ? sum : x;
    else if (op == ReduceOp::MAX)
      sum = std::isnan(sum) || sum > x ? sum : x;
    else
      sum += x;
  }
  return T(op == ReduceOp::AVG ? sum / float(inputs.size()) : sum);
}

}  // namespace

TEMPLATE_TEST_CASE("reductions of all halves have the bits of scalar code", "", c10::Half,
                   c10::BFloat16) {
  const size_t count = GENERATE(1, 2, 3, 5);
  const auto op =
      GENERATE(ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX);
  std::vector<std::vector<TestType>> inputs;
  for (size_t k = 0; k < count; ++k) inputs.push_back(all_values<TestType>(uint32_t(k)));
  auto out = inputs[0];  // also an input
  std::vector<const uint8_t*> data{reinterpret_cast<const uint8_t*>(out.data())};
  for (size_t k = 1; k < count; ++k) {
    data.push_back(reinterpret_cast<const uint8_t*>(inputs[k].data()));
  }
  collective::reduce(op, c10::CppTypeToScalarType<TestType>::value, data, out.size(),
                     reinterpret_cast<uint8_t*>(out.data()));
  size_t different = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const TestType expected = reduced(op, inputs, i);
    const bool is_same =
        std::isnan(float(expected)) ? std::isnan(float(out[i])) : out[i].x == expected.x;
    if (!is_same) ++different;
  }
  CHECK(different == 0);
}
