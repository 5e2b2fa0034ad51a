#pragma once

#include <cstdint>

#include "distrain/job/train_log.h"
#include "distrain/models/embedding_table.h"
#include "distrain/optim/update_rule.h"
#include "distrain/scenario/hybrid.h"

namespace distrain::scenario {

/// As fastText's for real text, so that the sum over a long one does not drown the rest; the
/// tutorial's for random batches.
double embedding_range(const HybridOptions& options);

models::Dense make_dense(const HybridOptions& options, int64_t classes, c10::Device device);

optim::OptimizerOptions optimizer_options(const HybridOptions& options);

/// Adds a batch's logits and targets.
void evaluate_batch(job::Evaluation& evaluation, const at::Tensor& logits,
                    const at::Tensor& targets);

}  // namespace distrain::scenario
