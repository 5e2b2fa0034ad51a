#pragma once

#include <functional>
#include <optional>
#include <span>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "distrain/base/clock.h"
#include "distrain/data/source.h"
#include "distrain/job/job.h"

namespace distrain::job {

struct Step {
  int64_t epoch = 1;
  int shard = 0;       ///< the shard of the data; trainer i's own shard has the number i. With
                       ///< Training::read() always the trainer's number
  int64_t number = 0;  ///< number of the step in the shard and epoch, from 0
  int64_t total = 0;   ///< steps that this trainer has made since the job's beginning
  int64_t left = 0;    ///< steps that follow for certain: `number` + 1 and so on of the same shard
  /// False if the shard's stream has ended and others have not: Note [Uneven shards]. The step then
  /// makes the same passes as the other trainers' steps, with zero gradients. Buffers of replicas
  /// under DDP, such as those of BatchNorm, are trainer 0's also after its data has ended.
  bool has_data = true;
  data::Source* source = nullptr;  ///< of Training::read(); may be null if has_data is false
};

struct Result {
  at::Tensor loss;  ///< one number; the job ends with an error if it is not finite
  int64_t samples = 0;
  Json more = Json::object();      ///< further fields of the `step` line
  int64_t steps = 1;               ///< number of steps that the `end` line counts for this step
  Json progress = Json::object();  ///< further fields of EventSink::progress()
  bool has_gradients = false;      ///< the step has called backward() itself
  /// Adds a part of the step, with its part of the loss.
  void add(const at::Tensor& part_of_loss, int64_t its_samples) {
    loss = loss.defined() ? loss.add(part_of_loss.detach()) : part_of_loss.detach();
    samples += its_samples;
  }
};

/// The examples `first(n)` to `end(n)` - 1 of n: a trainer's share, or a part of a step.
struct Share {
  int index = 0;
  int count = 1;
  int64_t first(int64_t n) const { return n * index / count; }
  int64_t end(int64_t n) const { return n * (index + 1) / count; }
  bool is_last() const { return index + 1 == count; }
  /// Calls `use` with the indices of the share's examples, `batch_size` at a time.
  void each_batch(int64_t n, int64_t batch_size,
                  const std::function<void(std::span<const int64_t> examples)>& use) const;
};

/// A model's results on some examples: the number of correct predictions, the sum of the losses,
/// and the metrics that the job's definition declares:
///
///   auto evaluation = job::Evaluation::of(scores, targets);
///   evaluation.means["abs_error"] = (scores - targets).abs().sum().item<double>();
///   definition.metric("abs_error", "mean absolute error");  // a field of `eval` and of `end.eval`
struct Evaluation {
  int64_t samples = 0;
  std::optional<int64_t> right{};  ///< correct predictions; unset if the job has no accuracy
  double loss_sum = 0;
  /// The job's own metrics by name, summed over the examples. Rank 0 adds the trainers' sums and
  /// reports the totals in `sums` as they are, those in `means` divided by the number of samples.
  std::map<std::string, double> sums{}, means{};
  /// The scores of the examples of class 1 and of class 0, in pieces: float [n]. Empty if
  /// of_binary() has not been used.
  std::vector<at::Tensor> positive{}, negative{};
  static constexpr auto kFields =
      std::tuple(&Evaluation::samples, &Evaluation::right, &Evaluation::loss_sum, &Evaluation::sums,
                 &Evaluation::means, &Evaluation::positive, &Evaluation::negative);
  /// Evaluates `scores` [n, classes] for int64 `targets` [n] by cross-entropy, on any devices.
  static Evaluation of(const at::Tensor& scores, const at::Tensor& targets);
  /// Evaluates the logits [n] or [n, 1] of class 1 of two, for int64 `targets` [n] of 0 and 1, by
  /// log loss. auc() then has a value.
  static Evaluation of_binary(const at::Tensor& logits, const at::Tensor& targets);
  void add(const Evaluation& other);
  /// Adds examples: `scores` [n, classes], int64 `targets` [n], and the sum of their losses.
  void add(const at::Tensor& scores, const at::Tensor& targets, double more_loss);
  double loss() const { return loss_sum / static_cast<double>(samples); }
  bool has_auc() const { return !positive.empty() || !negative.empty(); }
  /// Returns the area under the ROC curve: the share of the pairs of a positive and a negative
  /// example in which the positive one has the higher score, where equal scores count half. The
  /// result is exact for fewer than 2^53 pairs. It is NaN if one class is missing or a score is
  /// NaN.
  double auc() const;
};

/// Prints step lines as `--log-interval N` says: a line for every Nth step or, if N is unset, for
/// the first step, the last step, and at most one step every 5 s in between.
///
///   StepLines lines(sink, "step", options.log_interval);
///   lines.add(number, [loss] { return Json{{"loss", loss}}; });  // after each step
///   lines.end();
class StepLines {
 public:
  /// `interval` is the N of `--log-interval`. If it is 0, no lines are printed.
  StepLines(EventSink& sink, std::string event, std::optional<int> interval)
      : sink_(sink), event_(std::move(event)), interval_(interval) {}

  /// If the line of step `number` (from 1) is due, emits the line and returns true. Otherwise
  /// returns false and, if the interval is unset, keeps `fields` for end().
  bool add(int64_t number, std::function<Json()> fields);
  /// Emits the last step's line if add() kept its fields. The next add() may start at step 1 again.
  void end() {
    if (const auto fields = std::exchange(pending_, nullptr)) sink_.emit(event_, fields());
    next_ = {};
  }

 private:
  EventSink& sink_;
  const std::string event_;
  const std::optional<int> interval_;
  base::TimePoint next_{};         // time when the next line is due, if the interval is unset
  std::function<Json()> pending_;  // kept by add() for end(); null if the last step has a line
};

/// Returns the loss of a step. Throws `not_finite` for NaN and infinity, and `invalid` if `loss` is
/// not one number; both messages name the epoch and the step.
double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step);

}  // namespace distrain::job
