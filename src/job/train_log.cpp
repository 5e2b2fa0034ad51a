#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/job/training.h"

namespace distrain::job {

double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step) {
  if (!loss.defined() || loss.numel() != 1) {
    base::invalid(
        fmt::format("the loss at epoch {}, step {} is not one number: return its mean or "
                    "sum, such as loss.mean()",
                    epoch, step));
  }
  const double value = loss.item<double>();
  if (std::isfinite(value)) return value;
  throw base::Exception(base::ErrorKind::kNotFinite,
                        fmt::format("the loss is {} at epoch {}, step {}: try a smaller --lr",
                                    std::isnan(value) ? "NaN" : "infinite", epoch, step));
}

bool StepLines::add(int64_t number, std::function<Json()> fields) {
  constexpr auto kInterval = std::chrono::seconds(5);
  const base::TimePoint now = base::Clock::now();
  const bool is_due = interval_ ? *interval_ > 0 && number % *interval_ == 0 : now >= next_;
  if (is_due) {
    pending_ = nullptr;
    next_ = now + kInterval;
    sink_.emit(event_, fields());
  } else if (!interval_) {
    pending_ = std::move(fields);
  }
  return is_due;
}

void StepLines::end() {
  if (const auto fields = std::exchange(pending_, nullptr)) sink_.emit(event_, fields());
  next_ = {};
}

void TrainingPlan::begin_epoch(int64_t epoch) {
  epoch_ = epoch;
  epoch_start_ = last_line_ = base::Clock::now();
  if (run_steps() == 0) first_ = epoch_start_;
  epoch_steps_ = epoch_samples_ = line_samples_ = 0;
  epoch_loss_ = 0;
}

void TrainingPlan::log_step(const Result& result, double loss, double lr) {
  ++epoch_steps_;
  ++total_;
  epoch_samples_ += result.samples;
  line_samples_ += result.samples;
  epoch_loss_ += loss;
  if (run_steps() == 1) first_loss_ = loss;
  if (!plan_.log) return;
  const double rate = static_cast<double>(line_samples_) / base::seconds_since(last_line_);
  const auto fields = [this, epoch = epoch_, step = total_, loss, lr, rate, more = result.more] {
    Json all{{"epoch", epoch}, {"step", step}, {"loss", loss}, {"lr", lr}};
    all[std::string(counted(plan_.unit)) + "_per_s"] = rate;
    all.update(more);
    return all;
  };
  if (!lines_.add(total_, fields)) return;
  last_line_ = base::Clock::now();
  line_samples_ = 0;
}

void TrainingPlan::end_epoch(bool is_last, bool is_partial) {
  if (is_last) lines_.end();
  if (epoch_ == 0) return;
  if (epoch_steps_ > 0) {
    train_s_ = base::seconds_since(first_);
    last_loss_ = epoch_loss_ / static_cast<double>(epoch_steps_);
  }
  Json fields{{"epoch", epoch_}, {"loss", epoch_steps_ > 0 ? Json(last_loss_) : Json()}};
  if (plan_.unit == Unit::kWords)
    fields["perplexity"] = epoch_steps_ > 0 ? Json(std::exp(last_loss_)) : Json();
  fields["steps"] = epoch_steps_;
  fields[counted(plan_.unit)] = epoch_samples_;
  fields["wall_s"] = base::seconds_since(epoch_start_);
  if (is_partial) fields["partial"] = true;
  if (plan_.log) process_.sink().emit("epoch", fields);
  epoch_ = epoch_steps_ = epoch_samples_ = 0;
}

}  // namespace distrain::job
