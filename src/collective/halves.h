#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace distrain::collective {

template <class T>
concept HalfType = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

#ifdef __x86_64__
using EightU32 [[gnu::vector_size(32)]] = uint32_t;

template <HalfType T>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline __m256 widen(const T* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (std::is_same_v<T, c10::Half>) return _mm256_cvtph_ps(bits);
  return __m256(EightU32(_mm256_cvtepu16_epi32(bits)) << 16);
}

/// Rounds to the nearest value, ties to even, as c10's conversions do. AVX-512 BF16 is not used,
/// because it flushes subnormal values to 0.
template <HalfType T>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline void narrow(__m256 x, T* to) {
  __m128i result;
  if constexpr (std::is_same_v<T, c10::Half>) {
    result = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  } else {
    const auto bits = EightU32(x);
    const auto high = __m256i((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    result = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), result);
}

/// Reduces the first elements of `inputs` in float32, in the order of `inputs`, and returns how
/// many these are: all but the last `count` % 8, or none if the CPU lacks AVX2. (CPUs with AVX2
/// have F16C; LibTorch relies on that, too.) The bits are those of scalar code with c10's
/// conversions, except that each NaN becomes the same quiet NaN. `out` may be one of `inputs`.
template <HalfType T, class Op>
[[gnu::target("avx2,f16c"), gnu::flatten]] size_t reduce_by_vectors(
    Op op, std::span<const T* const> inputs, size_t count, size_t divisor, T* out) {
  if (__builtin_cpu_supports("avx2") == 0) return 0;
  const __m256 nan = _mm256_set1_ps(__builtin_nanf(""));
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 sum = widen(inputs[0] + i);
    for (const T* input : inputs.subspan(1)) op(sum, widen(input + i));
    if (divisor != 1) sum /= _mm256_set1_ps(static_cast<float>(divisor));
    narrow(sum == sum ? sum : nan, out + i);
  }
  return i;
}
#endif

}  // namespace distrain::collective
