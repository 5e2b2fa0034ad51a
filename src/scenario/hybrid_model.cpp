#include "hybrid_model.h"

#include <cmath>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/parameter_versions.h"
#include "placed_tensors.h"

namespace distrain::scenario {

EmbeddingTable::EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed,
                               const std::string& device)
    : weight_(at::empty({rows, dim}, at::kFloat)) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  if (range > 0) {
    weight_.uniform_(-range, range, generator);
  } else {
    weight_.normal_(0, 1, generator);
  }
  weight_ = placed(weight_, c10::Device(device)).requires_grad_();
}

at::Tensor EmbeddingTable::forward(rpc::CallContext& call, at::Tensor indices, at::Tensor offsets) {
  const autograd::ParameterRead no_row_changes_meanwhile(call.agent);
  return for_rank(call.agent, call.caller.rank, lookup(indices, offsets));
}

at::Tensor EmbeddingTable::lookup(const at::Tensor& indices, const at::Tensor& offsets) const {
  const c10::Device device = weight_.device();
  return std::get<0>(at::embedding_bag(weight_, placed(indices, device), placed(offsets, device),
                                       /*scale_grad_by_freq=*/false,
                                       /*mode: sum*/ 0, /*sparse=*/true));
}

at::Tensor EmbeddingTable::weight(rpc::CallContext& call) {
  const autograd::ParameterRead no_row_changes_meanwhile(call.agent);
  return placed(weight_.detach(), c10::kCPU);
}

void EmbeddingTable::set_weight(at::Tensor weight) {
  const at::NoGradGuard no_grad;
  weight_.copy_(weight);
}

double embedding_range(const HybridOptions& options) {
  return options.data.empty() ? 0.0 : 1.0 / options.embedding_dim;
}

DenseImpl::DenseImpl(int64_t inputs, int64_t classes, uint64_t seed, c10::Device device) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
  const auto drawn = [&](at::IntArrayRef shape) {
    return placed(at::empty(shape, at::kFloat).uniform_(-bound, bound, generator), device);
  };
  weight = register_parameter("weight", drawn({classes, inputs}));
  bias = register_parameter("bias", drawn({classes}));
}

at::Tensor DenseImpl::forward(const at::Tensor& x) const { return at::linear(x, weight, bias); }

Dense make_dense(const HybridOptions& options, int64_t classes, c10::Device device) {
  return Dense(options.embedding_dim, classes, options.seed + 1, device);
}

optim::OptimizerOptions optimizer_options(const HybridOptions& options) {
  optim::OptimizerFields fields;
  fields.name = options.optimizer;
  fields.values["lr"] = options.lr;
  return optim::from_fields(fields);
}

void evaluate_batch(Evaluation& evaluation, const at::Tensor& logits, const at::Tensor& targets) {
  if (targets.numel() == 0) return;
  const double mean = at::cross_entropy_loss(logits, targets).item<double>();
  evaluation.add(logits, targets, mean * static_cast<double>(targets.numel()));
}

}  // namespace distrain::scenario
