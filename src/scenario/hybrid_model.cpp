#include "hybrid_model.h"

#include <cmath>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"

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

at::Tensor EmbeddingTable::forward(at::Tensor indices, at::Tensor offsets) {
  return std::get<0>(at::embedding_bag(weight_, indices, offsets, /*scale_grad_by_freq=*/false,
                                       /*mode: sum*/ 0, /*sparse=*/true));
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

void Evaluation::add(const Evaluation& other) {
  samples += other.samples;
  right += other.right;
  loss_sum += other.loss_sum;
}

void Evaluation::add(const at::Tensor& logits, const at::Tensor& targets) {
  const int64_t count = targets.numel();
  if (count == 0) return;
  samples += count;
  right += (logits.argmax(1) == targets).sum().item<int64_t>();
  loss_sum += at::cross_entropy_loss(logits, targets).item<double>() * static_cast<double>(count);
}

Json Evaluation::fields() const {
  if (samples == 0) return Json::object();
  const auto count = static_cast<double>(samples);
  return {{"loss", loss_sum / count},
          {"accuracy", static_cast<double>(right) / count},
          {"samples", samples}};
}

double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step) {
  const double value = loss.item<double>();
  if (std::isfinite(value)) return value;
  throw base::Exception(base::ErrorKind::kNotFinite,
                        "the loss is " + std::string(std::isnan(value) ? "NaN" : "infinite") +
                            " at epoch " + std::to_string(epoch) + ", step " +
                            std::to_string(step) + ": try a smaller --lr");
}

void TrainLog::begin_epoch(int64_t epoch) {
  epoch_ = epoch;
  epoch_start_ = last_line_ = base::Clock::now();
  if (total_steps_ == 0) first_ = epoch_start_;
  steps_ = samples_ = line_samples_ = 0;
  loss_sum_ = 0;
}

void TrainLog::step(double loss, int64_t samples) {
  ++steps_;
  ++total_steps_;
  samples_ += samples;
  line_samples_ += samples;
  loss_sum_ += loss;
  if (options_.log_interval <= 0 || total_steps_ % options_.log_interval != 0) return;
  const auto now = base::Clock::now();
  const double elapsed = std::chrono::duration<double>(now - last_line_).count();
  sink_.emit("step", {{"epoch", epoch_},
                      {"step", total_steps_},
                      {"loss", loss},
                      {"samples_per_s", static_cast<double>(line_samples_) / elapsed}});
  last_line_ = now;
  line_samples_ = 0;
}

void TrainLog::end_epoch() {
  train_s_ = base::seconds_since(first_);
  last_loss_ = loss_sum_ / static_cast<double>(steps_);
  sink_.emit("epoch", {{"epoch", epoch_},
                       {"loss", last_loss_},
                       {"steps", steps_},
                       {"samples", samples_},
                       {"wall_s", base::seconds_since(epoch_start_)}});
}

}  // namespace distrain::scenario
