#include "loss.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/trace.h"
#include "distrain/job/training.h"
#include "distrain/rpc/placed.h"

namespace distrain::scenario {

std::vector<PipelineBatch> micro_batches(const PipelineBatch& batch, int64_t num_split) {
  const std::vector<at::Tensor> images = batch.images.tensor_split(num_split);
  const std::vector<at::Tensor> labels = batch.labels.tensor_split(num_split);
  std::vector<PipelineBatch> cut;
  for (size_t i = 0; i < images.size(); ++i) cut.push_back({images[i], labels[i]});
  return cut;
}

at::Tensor loss_share(const PipelineOptions& options, const at::Tensor& scores,
                      const at::Tensor& wherever) {
  const base::TraceScope scope("loss");
  const at::Tensor labels = rpc::placed(wherever, scores.device());
  const auto samples = static_cast<double>(options.batch_size);
  if (options.loss == "ce") {
    return at::cross_entropy_loss(scores, labels, {}, at::Reduction::Sum) / samples;
  }
  const at::Tensor wanted = at::one_hot(labels, options.classes).to(scores.scalar_type());
  return at::mse_loss(scores, wanted, at::Reduction::Sum) /
         (samples * static_cast<double>(options.classes));
}

BatchResult judge(const PipelineOptions& options, const std::vector<at::Tensor>& scores,
                  const PipelineBatch& batch, int64_t index) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = at::cat(scores);
  BatchResult result;
  result.loss = job::checked_loss(loss_share(options, all, batch.labels), 1, index + 1);
  if (!options.data.empty()) {
    const at::Tensor labels = rpc::placed(batch.labels, all.device());
    result.accuracy = all.argmax(1).eq(labels).to(at::kDouble).mean().item<double>();
  }
  return result;
}

}  // namespace distrain::scenario
