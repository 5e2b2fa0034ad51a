#include "distrain/nn/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include "distrain/base/random.h"
#include "distrain/rpc/to_device.h"

namespace distrain::nn {

at::Generator keyed_generator(std::initializer_list<uint64_t> key) {
  return at::make_generator<at::CPUGeneratorImpl>(base::Random(key).next());
}

at::Tensor uniform(at::IntArrayRef sizes, double bound, at::Generator generator,
                   c10::Device device) {
  return rpc::to_device(at::empty(sizes, at::kFloat).uniform_(-bound, bound, generator), device);
}

at::Tensor Dropout::masked(const at::Tensor& x, at::IntArrayRef mask_shape, double p) {
  if (!generator_.defined() || p == 0) return x;
  // Draw on the CPU, so that the numbers do not depend on the device.
  const at::Tensor mask = at::empty(mask_shape, x.options().requires_grad(false).device(at::kCPU));
  mask.bernoulli_(1 - p, generator_);
  if (p < 1) mask.div_(1 - p);  // if p is 1, all of `mask` is 0
  return x * rpc::to_device(mask, x.device());
}

}  // namespace distrain::nn
