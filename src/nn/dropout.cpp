#include "distrain/nn/dropout.h"

#include <ATen/Functions.h>

#include "distrain/nn/keyed_generator.h"
#include "distrain/rpc/to_device.h"

namespace distrain::nn {

Dropout::Dropout(std::initializer_list<uint64_t> key)
    : on_(true), generator_(keyed_generator(key)) {}

at::Tensor Dropout::masked(const at::Tensor& x, at::IntArrayRef mask_shape, double p) {
  if (!on_ || p == 0) return x;
  // Draw on the CPU, so that the numbers do not depend on the device.
  const at::Tensor mask = at::empty(mask_shape, x.options().requires_grad(false).device(at::kCPU));
  mask.bernoulli_(1 - p, generator_);
  if (p < 1) mask.div_(1 - p);  // if p is 1, all of `mask` is 0
  return x * rpc::to_device(mask, x.device());
}

at::Tensor Dropout::operator()(const at::Tensor& x, double p) { return masked(x, x.sizes(), p); }

at::Tensor Dropout::channels(const at::Tensor& x, double p) {
  return masked(x, {x.size(0), x.size(1), 1, 1}, p);
}

}  // namespace distrain::nn
