#pragma once

#include <cstdint>
#include <initializer_list>

#include <ATen/core/Tensor.h>

namespace distrain::nn {

/// Returns a new CPU generator seeded from `key`.
at::Generator keyed_generator(std::initializer_list<uint64_t> key);
/// Draws uniform floats from -bound to bound on the CPU, and moves them to `device`.
at::Tensor uniform(at::IntArrayRef sizes, double bound, at::Generator generator,
                   c10::Device device);

/// Dropout whose random numbers depend only on a key, such as (seed, epoch, trainer, step), so that
/// a pass has the same result in every process and after every resume.
class Dropout {
 public:
  /// Creates a dropout that returns its input unchanged, for evaluation.
  Dropout() = default;
  explicit Dropout(std::initializer_list<uint64_t> key) : generator_(keyed_generator(key)) {}

  /// Zeroes each element with probability `p`, else divides it by 1 - p, as torch's dropout().
  at::Tensor operator()(const at::Tensor& x, double p) { return masked(x, x.sizes(), p); }
  /// Zeroes whole channels of `x`, which is [n, channels, height, width], as torch's dropout2d().
  at::Tensor channels(const at::Tensor& x, double p) {
    return masked(x, {x.size(0), x.size(1), 1, 1}, p);
  }

 private:
  at::Tensor masked(const at::Tensor& x, at::IntArrayRef mask_shape, double p);

  at::Generator generator_;  // undefined: the input is returned unchanged
};

}  // namespace distrain::nn
