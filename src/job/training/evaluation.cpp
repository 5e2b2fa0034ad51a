#include "distrain/job/evaluation.h"

#include <ATen/Functions.h>

#include "distrain/rpc/to_device.h"

namespace distrain::job {

Evaluation Evaluation::of(const at::Tensor& scores, const at::Tensor& targets) {
  const at::Tensor here = rpc::to_device(targets, scores.device());
  const at::Tensor loss = at::cross_entropy_loss(scores, here, {}, at::Reduction::Sum);
  Evaluation evaluation;
  evaluation.add(scores, here, loss.item<double>());
  return evaluation;
}

void Evaluation::add(const Evaluation& other) {
  samples += other.samples;
  if (other.right) right = right.value_or(0) + *other.right;
  loss_sum += other.loss_sum;
  for (const auto& [name, sum] : other.sums) sums[name] += sum;
  for (const auto& [name, sum] : other.means) means[name] += sum;
}

void Evaluation::add(const at::Tensor& scores, const at::Tensor& targets, double more_loss) {
  samples += targets.numel();
  right = right.value_or(0) + (scores.argmax(1) == targets).sum().item<int64_t>();
  loss_sum += more_loss;
}

}  // namespace distrain::job
