#pragma once

#include <cstdint>
#include <initializer_list>

#include <ATen/core/Tensor.h>

namespace distrain::nn {

/// Dropout whose random numbers depend on nothing but a key, such as (seed, epoch, trainer, step):
/// not on what else the process draws. So a pass gives the same in every process and after every
/// resume, and a checkpoint needs no generator's state.
class Dropout {
 public:
  /// Lets everything through: evaluation.
  Dropout() = default;
  explicit Dropout(std::initializer_list<uint64_t> key);

  bool on() const { return on_; }
  /// As torch.nn.functional.dropout: zeroes with probability `p`, divides the rest by 1 - p.
  at::Tensor operator()(const at::Tensor& x, double p);
  /// Whole channels of [n, channels, height, width]. As torch.nn.functional.dropout2d.
  at::Tensor channels(const at::Tensor& x, double p);

 private:
  at::Tensor masked(const at::Tensor& x, at::IntArrayRef mask_shape, double p);

  bool on_ = false;
  at::Generator generator_;
};

/// A generator for this key alone.
at::Generator keyed_generator(std::initializer_list<uint64_t> key);
/// Floats from -bound to bound on `device`, drawn on the CPU: the same numbers everywhere.
at::Tensor uniform(at::IntArrayRef sizes, double bound, at::Generator generator,
                   c10::Device device);

}  // namespace distrain::nn
