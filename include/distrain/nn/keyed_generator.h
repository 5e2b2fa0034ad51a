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

}  // namespace distrain::nn
