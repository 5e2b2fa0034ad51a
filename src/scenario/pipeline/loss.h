#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "data.h"
#include "distrain/scenario/pipeline.h"

namespace distrain::scenario {

/// What came of one batch.
struct BatchResult {
  double loss = 0;
  std::optional<double> accuracy;  ///< where there are labels to hit: not with random data
  double batch_s = 0;              ///< passes and update, to the end of what devices do
  /// Each stage's own computing time; none where a device computes.
  std::vector<std::optional<double>> stage_s;
  std::vector<int64_t> activations;  ///< micro-batches that each stage held at most
};

/// A batch cut into micro-batches, as tensor_split cuts: sizes differ by one at most, larger ones
/// first.
std::vector<PipelineBatch> micro_batches(const PipelineBatch& batch, int64_t num_split);

/// What a micro-batch adds to the loss of its batch of `batch_size`: the sum over all micro-batches
/// is the mean over the batch, and so are the gradients. `scores` [n, classes], on any device.
at::Tensor loss_share(const PipelineOptions& options, const at::Tensor& scores,
                      const at::Tensor& labels);

/// Loss and accuracy of a whole batch. Throws `not_finite`, naming the batch (from 0).
BatchResult judge(const PipelineOptions& options, const std::vector<at::Tensor>& scores,
                  const PipelineBatch& batch, int64_t index);

}  // namespace distrain::scenario
