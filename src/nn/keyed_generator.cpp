#include "distrain/nn/keyed_generator.h"

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
  const at::Tensor drawn = at::empty(sizes, at::kFloat).uniform_(-bound, bound, generator);
  return rpc::to_device(drawn, device);
}

}  // namespace distrain::nn
