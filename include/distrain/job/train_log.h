#pragma once

#include <chrono>
#include <cstdint>

#include <ATen/core/Tensor.h>

#include "distrain/job/events.h"
#include "distrain/job/job.h"

namespace distrain::job {

/// How many of some examples the model gets right, and the sum of their losses.
struct Evaluation {
  int64_t samples = 0;
  int64_t right = 0;  ///< not of words
  double loss_sum = 0;
  static constexpr auto kFields =
      std::tuple(&Evaluation::samples, &Evaluation::right, &Evaluation::loss_sum);
  /// By cross-entropy, of `scores` [n, classes] and int64 `targets` [n], wherever these are.
  static Evaluation of(const at::Tensor& scores, const at::Tensor& targets);
  void add(const Evaluation& other);
  /// `scores` [n, classes], the sum of whose losses is `loss_sum`; int64 `targets` [n].
  void add(const at::Tensor& scores, const at::Tensor& targets, double loss_sum);
  double loss() const { return loss_sum / static_cast<double>(samples); }
  /// loss, accuracy or perplexity, samples or words; empty where there are none.
  Json fields(Unit unit = Unit::kSamples) const;
};

/// `not_finite`, naming where, unless it is a number.
double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step);

/// The same of an evaluation.
void check_finite_loss(double loss);

/// Emits a trainer's `step` and `epoch` lines, and counts for `end`.
class TrainLog {
 public:
  /// A `step` line every `interval` steps, 0: none. With words, losses are shown as perplexities
  /// beside. Without `tells` it only counts.
  TrainLog(int interval, EventSink& sink, Unit unit = Unit::kSamples, bool tells = true)
      : interval_(interval), sink_(sink), unit_(unit), tells_(tells) {}

  /// For a job that goes on where a checkpoint left off.
  void resume_after(int64_t steps) { total_steps_ = first_step_ = steps; }

  void begin_epoch(int64_t epoch);
  /// `more`: further fields of the `step` line.
  void step(double loss, int64_t samples, const Json& more = Json::object());
  /// Does nothing when no epoch has begun.
  void end_epoch();

  int64_t epoch() const { return epoch_; }         ///< that has begun; 0: none
  int64_t epoch_steps() const { return steps_; }   ///< of that epoch so far
  double last_loss() const { return last_loss_; }  ///< mean of the last epoch
  int64_t steps() const { return total_steps_ - first_step_; }
  double train_s() const { return train_s_; }  ///< first step to last

 private:
  const int interval_;
  EventSink& sink_;
  const Unit unit_;
  const bool tells_;
  std::chrono::steady_clock::time_point first_{};
  std::chrono::steady_clock::time_point epoch_start_;
  std::chrono::steady_clock::time_point last_line_;
  int64_t epoch_ = 0;
  int64_t first_step_ = 0;
  int64_t total_steps_ = 0;
  int64_t steps_ = 0;         // of this epoch
  int64_t samples_ = 0;       // of this epoch
  int64_t line_samples_ = 0;  // since the last line
  double loss_sum_ = 0;
  double last_loss_ = 0;
  double train_s_ = 0;
};

}  // namespace distrain::job
