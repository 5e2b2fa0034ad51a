#include "embedding_table.h"

#include <cmath>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include "distrain/autograd/parameter_versions.h"
#include "distrain/nn/keyed_generator.h"
#include "distrain/nn/sized_by.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

EmbeddingTable::EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed,
                               const std::string& device) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const c10::Device where(device);
  weight_ = nn::sized_by("--num-embeddings or --embedding-dim", [&] {
    return range > 0 ? nn::uniform({rows, dim}, range, generator, where)
                     : rpc::to_device(at::randn({rows, dim}, generator), where);
  });
  weight_.requires_grad_();
}

at::Tensor EmbeddingTable::forward(rpc::CallContext& call, at::Tensor indices, at::Tensor offsets) {
  const autograd::ParameterRead no_row_changes_meanwhile(call.agent);
  return rpc::for_rank(call.agent, call.caller.rank, lookup(indices, offsets));
}

at::Tensor EmbeddingTable::lookup(const at::Tensor& indices, const at::Tensor& offsets) const {
  const c10::Device device = weight_.device();
  rpc::check_rows(indices, weight_);
  return std::get<0>(at::embedding_bag(weight_, rpc::to_device(indices, device),
                                       rpc::to_device(offsets, device),
                                       /*scale_grad_by_freq=*/false,
                                       /*mode: sum*/ 0, /*sparse=*/true));
}

DenseImpl::DenseImpl(int64_t inputs, int64_t classes, uint64_t seed, c10::Device device) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
  weight = register_parameter("weight", nn::uniform({classes, inputs}, bound, generator, device));
  bias = register_parameter("bias", nn::uniform({classes}, bound, generator, device));
}

at::Tensor DenseImpl::forward(const at::Tensor& x) const { return at::linear(x, weight, bias); }

}  // namespace distrain::scenario
