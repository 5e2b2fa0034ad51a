#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/job/training.h"

namespace distrain::job {

double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step) {
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

void TrainLog::begin_epoch(int64_t epoch) {
  epoch_ = epoch;
  epoch_start_ = last_line_ = base::Clock::now();
  if (steps() == 0) first_ = epoch_start_;
  steps_ = samples_ = line_samples_ = 0;
  loss_sum_ = 0;
}

void TrainLog::step(double loss, double lr, int64_t samples, const Json& more) {
  ++steps_;
  ++total_;
  samples_ += samples;
  line_samples_ += samples;
  loss_sum_ += loss;
  if (steps() == 1) first_loss_ = loss;
  if (!plan_.log) return;
  const double rate = static_cast<double>(line_samples_) / base::seconds_since(last_line_);
  const auto fields = [this, epoch = epoch_, step = total_, loss, lr, rate, more] {
    Json all{{"epoch", epoch}, {"step", step}, {"loss", loss}, {"lr", lr}};
    all[std::string(counted(plan_.unit)) + "_per_s"] = rate;
    all.update(more);
    return all;
  };
  if (!lines_.add(total_, fields)) return;
  last_line_ = base::Clock::now();
  line_samples_ = 0;
}

std::optional<std::string> TrainLog::take_warning() {
  constexpr double kFarAbove = 1000;
  if (has_warned_ || last_loss_ <= kFarAbove * std::max(1.0, first_loss_)) return std::nullopt;
  has_warned_ = true;
  return fmt::format(
      "the loss grows: {:.3g} in the last epoch, {:.3g} in the first step: try a "
      "smaller --lr",
      last_loss_, first_loss_);
}

void TrainLog::end_epoch(bool is_last) {
  if (is_last) lines_.end();
  if (epoch_ == 0) return;
  if (steps_ > 0) {
    train_s_ = base::seconds_since(first_);
    last_loss_ = loss_sum_ / static_cast<double>(steps_);
  }
  Json fields{{"epoch", epoch_}, {"loss", steps_ > 0 ? Json(last_loss_) : Json()}};
  if (plan_.unit == Unit::kWords)
    fields["perplexity"] = steps_ > 0 ? Json(std::exp(last_loss_)) : Json();
  fields["steps"] = steps_;
  fields[counted(plan_.unit)] = samples_;
  fields["wall_s"] = base::seconds_since(epoch_start_);
  if (plan_.log) sink_.emit("epoch", fields);
  epoch_ = steps_ = samples_ = 0;
}

}  // namespace distrain::job
