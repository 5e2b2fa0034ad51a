#include "distrain/job/train_log.h"

#include <cmath>

#include <ATen/Functions.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/rpc/placed.h"

namespace distrain::job {

Evaluation Evaluation::of(const at::Tensor& scores, const at::Tensor& targets) {
  const at::Tensor here = rpc::placed(targets, scores.device());
  const at::Tensor loss = at::cross_entropy_loss(scores, here, {}, at::Reduction::Sum);
  Evaluation evaluation;
  evaluation.add(scores, here, loss.item<double>());
  return evaluation;
}

void Evaluation::add(const Evaluation& other) {
  samples += other.samples;
  right += other.right;
  loss_sum += other.loss_sum;
}

void Evaluation::add(const at::Tensor& scores, const at::Tensor& targets, double more_loss) {
  samples += targets.numel();
  right += (scores.argmax(1) == targets).sum().item<int64_t>();
  loss_sum += more_loss;
}

Json Evaluation::fields(Unit unit) const {
  if (samples == 0) return Json::object();
  Json fields{{"loss", loss()}};
  if (unit == Unit::kWords) {
    fields["perplexity"] = std::exp(loss());
  } else {
    fields["accuracy"] = static_cast<double>(right) / static_cast<double>(samples);
  }
  fields[counted(unit)] = samples;
  return fields;
}

double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step) {
  const double value = loss.item<double>();
  if (std::isfinite(value)) return value;
  throw base::Exception(base::ErrorKind::kNotFinite,
                        "the loss is " + std::string(std::isnan(value) ? "NaN" : "infinite") +
                            " at epoch " + std::to_string(epoch) + ", step " +
                            std::to_string(step) + ": try a smaller --lr");
}

void check_finite_loss(double loss) {
  if (std::isfinite(loss)) return;
  throw base::Exception(base::ErrorKind::kNotFinite,
                        "the loss of the evaluation is not finite: try a smaller --lr");
}

void TrainLog::begin_epoch(int64_t epoch) {
  epoch_ = epoch;
  epoch_start_ = last_line_ = base::Clock::now();
  if (steps() == 0) first_ = epoch_start_;
  steps_ = samples_ = line_samples_ = 0;
  loss_sum_ = 0;
}

void TrainLog::step(double loss, int64_t samples, const Json& more) {
  ++steps_;
  ++total_steps_;
  samples_ += samples;
  line_samples_ += samples;
  loss_sum_ += loss;
  if (!tells_ || interval_ <= 0 || total_steps_ % interval_ != 0) return;
  const auto now = base::Clock::now();
  const double elapsed = std::chrono::duration<double>(now - last_line_).count();
  Json fields{{"epoch", epoch_}, {"step", total_steps_}, {"loss", loss}};
  fields[unit_ == Unit::kWords ? "words_per_s" : "samples_per_s"] =
      static_cast<double>(line_samples_) / elapsed;
  fields.update(more);
  sink_.emit("step", fields);
  last_line_ = now;
  line_samples_ = 0;
}

void TrainLog::end_epoch() {
  if (epoch_ == 0) return;
  if (steps_ > 0) {
    train_s_ = base::seconds_since(first_);
    last_loss_ = loss_sum_ / static_cast<double>(steps_);
  }
  Json fields{{"epoch", epoch_}, {"loss", steps_ > 0 ? Json(last_loss_) : Json()}};
  if (unit_ == Unit::kWords)
    fields["perplexity"] = steps_ > 0 ? Json(std::exp(last_loss_)) : Json();
  fields["steps"] = steps_;
  fields[counted(unit_)] = samples_;
  fields["wall_s"] = base::seconds_since(epoch_start_);
  if (tells_) sink_.emit("epoch", fields);
  epoch_ = steps_ = samples_ = 0;
}

}  // namespace distrain::job
