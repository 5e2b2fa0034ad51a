#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace distrain::job {

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
  /// Sums over the examples, by metric name. They are summed over all trainers; the totals of
  /// `means` are then divided by the total of `samples`.
  std::map<std::string, double> sums{}, means{};
  static constexpr auto kFields =
      std::tuple(&Evaluation::samples, &Evaluation::right, &Evaluation::loss_sum, &Evaluation::sums,
                 &Evaluation::means);
  /// Evaluates by cross-entropy `scores` [n, classes] and int64 `targets` [n] on any devices.
  static Evaluation of(const at::Tensor& scores, const at::Tensor& targets);
  void add(const Evaluation& other);
  /// Adds examples: `scores` [n, classes], int64 `targets` [n], and the sum of their losses.
  void add(const at::Tensor& scores, const at::Tensor& targets, double loss_sum);
  double loss() const { return loss_sum / static_cast<double>(samples); }
};

}  // namespace distrain::job
