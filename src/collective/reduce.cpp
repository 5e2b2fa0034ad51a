#include "reduce.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include <ATen/Dispatch_v2.h>

namespace distrain::collective {

namespace {

// Fits in the first-level cache. The constant trip count lets -O2 vectorise.
constexpr size_t kBlock = 512;

// Sums and products of integers are computed in unsigned types of at least 32 bits, which wrap.
template <class T>
using Wide = std::conditional_t<!std::is_integral_v<T>, T,
                                std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>>;

constexpr auto kSum = []<class T>(T a, T b) { return static_cast<T>(Wide<T>(a) + Wide<T>(b)); };
constexpr auto kProduct = []<class T>(T a, T b) { return static_cast<T>(Wide<T>(a) * Wide<T>(b)); };
// `a != a` is true only for NaN.
constexpr auto kMin = []<class T>(T a, T b) { return (a != a || a < b) ? a : b; };
constexpr auto kMax = []<class T>(T a, T b) { return (a != a || a > b) ? a : b; };
// Reduce bools as bytes, because a peer may send other bytes than 0 and 1.
constexpr auto kOr = [](uint8_t a, uint8_t b) -> uint8_t { return (a | b) != 0; };
constexpr auto kAnd = [](uint8_t a, uint8_t b) -> uint8_t { return a != 0 && b != 0; };

template <class T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>;

template <class T, class Op>
[[gnu::always_inline]] inline void reduce_some(Op op, std::span<const T* const> inputs,
                                               size_t begin, size_t count, size_t divisor, T* out) {
  using A = Accumulator<T>;
  A sum[kBlock];
  const T* first = inputs[0] + begin;
  for (size_t i = 0; i < count; ++i) sum[i] = static_cast<A>(first[i]);
  for (const T* input : inputs.subspan(1)) {
    input += begin;
    for (size_t i = 0; i < count; ++i) sum[i] = op(sum[i], static_cast<A>(input[i]));
  }
  if constexpr (std::is_floating_point_v<A>) {
    if (divisor != 1) {
      for (size_t i = 0; i < count; ++i) sum[i] /= static_cast<A>(divisor);
    }
  }
  // Each element is read from all inputs before it is written, so `out` may be one of them.
  for (size_t i = 0; i < count; ++i) out[begin + i] = static_cast<T>(sum[i]);
}

template <class T, class Op>
void reduce_all(Op op, std::span<const uint8_t* const> inputs, size_t count, bool average,
                uint8_t* out) {
  const std::span<const T* const> typed(reinterpret_cast<const T* const*>(inputs.data()),
                                        inputs.size());
  auto* result = reinterpret_cast<T*>(out);
  const size_t divisor = average ? inputs.size() : 1;
  size_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    reduce_some<T>(op, typed, begin, kBlock, divisor, result);
  }
  if (begin < count) reduce_some<T>(op, typed, begin, count - begin, divisor, result);
}

template <class T>
void reduce_typed(ReduceOp op, std::span<const uint8_t* const> inputs, size_t count, uint8_t* out) {
  switch (op) {
    case ReduceOp::PRODUCT:
      return reduce_all<T>(kProduct, inputs, count, false, out);
    case ReduceOp::MIN:
      return reduce_all<T>(kMin, inputs, count, false, out);
    case ReduceOp::MAX:
      return reduce_all<T>(kMax, inputs, count, false, out);
    default:
      return reduce_all<T>(kSum, inputs, count, op == ReduceOp::AVG, out);
  }
}

}  // namespace

bool can_reduce(ReduceOp op, c10::ScalarType dtype) {
  using enum c10::ScalarType;
  constexpr std::array kReal = {Double, Float, Half, BFloat16};
  if (std::ranges::find(kReal, dtype) != kReal.end()) return op <= ReduceOp::MAX;
  if (dtype == ComplexFloat || dtype == ComplexDouble) {
    return op == ReduceOp::SUM || op == ReduceOp::AVG;
  }
  return c10::isIntegralType(dtype, /*includeBool=*/true) && op <= ReduceOp::MAX &&
         op != ReduceOp::AVG;
}

void reduce(ReduceOp op, c10::ScalarType dtype, std::span<const uint8_t* const> inputs,
            size_t count, uint8_t* out) {
  if (c10::isComplexType(dtype)) {
    dtype = c10::toRealValueType(dtype);
    count *= 2;
  }
  if (dtype == c10::ScalarType::Bool) {
    return op == ReduceOp::SUM || op == ReduceOp::MAX
               ? reduce_all<uint8_t>(kOr, inputs, count, false, out)
               : reduce_all<uint8_t>(kAnd, inputs, count, false, out);
  }
  AT_DISPATCH_V2(dtype, "reduce", AT_WRAP([&] { reduce_typed<scalar_t>(op, inputs, count, out); }),
                 AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), at::kHalf,
                 at::kBFloat16);
}

}  // namespace distrain::collective
