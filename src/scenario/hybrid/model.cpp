#include "model.h"

#include <ATen/Functions.h>

namespace distrain::scenario {

double embedding_range(const HybridOptions& options) {
  return options.data.empty() ? 0.0 : 1.0 / options.embedding_dim;
}

models::Dense make_dense(const HybridOptions& options, int64_t classes, c10::Device device) {
  return models::Dense(options.embedding_dim, classes, options.seed + 1, device);
}

optim::OptimizerOptions optimizer_options(const HybridOptions& options) {
  optim::OptimizerFields fields;
  fields.name = options.optimizer;
  fields.values["lr"] = options.lr;
  return optim::from_fields(fields);
}

void evaluate_batch(job::Evaluation& evaluation, const at::Tensor& logits,
                    const at::Tensor& targets) {
  if (targets.numel() == 0) return;
  const double mean = at::cross_entropy_loss(logits, targets).item<double>();
  evaluation.add(logits, targets, mean * static_cast<double>(targets.numel()));
}

}  // namespace distrain::scenario
