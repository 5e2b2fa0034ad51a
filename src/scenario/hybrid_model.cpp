#include "hybrid_model.h"

#include <cmath>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/parameter_versions.h"

namespace distrain::scenario {

EmbeddingTable::EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed)
    : weight_(at::empty({rows, dim}, at::kFloat)) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  if (range > 0) {
    weight_.uniform_(-range, range, generator);
  } else {
    weight_.normal_(0, 1, generator);
  }
  weight_.requires_grad_();
}

at::Tensor EmbeddingTable::forward(rpc::CallContext& call, at::Tensor indices, at::Tensor offsets) {
  const autograd::ParameterRead no_row_changes_meanwhile(call.agent);
  return lookup(indices, offsets);
}

at::Tensor EmbeddingTable::lookup(const at::Tensor& indices, const at::Tensor& offsets) const {
  return std::get<0>(at::embedding_bag(weight_, indices, offsets, /*scale_grad_by_freq=*/false,
                                       /*mode: sum*/ 0, /*sparse=*/true));
}

void EmbeddingTable::set_weight(at::Tensor weight) {
  const at::NoGradGuard no_grad;
  weight_.copy_(weight);
}

double embedding_range(const HybridOptions& options) {
  return options.data.empty() ? 0.0 : 1.0 / options.embedding_dim;
}

torch::nn::Linear make_dense(const HybridOptions& options, int64_t classes) {
  torch::nn::Linear dense(options.embedding_dim, classes);
  // torch.nn.Linear's initialisation, from a generator of our own.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed + 1);
  const double bound = 1.0 / std::sqrt(static_cast<double>(options.embedding_dim));
  const at::NoGradGuard no_grad;
  dense->weight.uniform_(-bound, bound, generator);
  dense->bias.uniform_(-bound, bound, generator);
  return dense;
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
