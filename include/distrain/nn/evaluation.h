#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace distrain::nn {

/// How many of some examples a model gets right, the sum of their losses, and metrics of a job's
/// own, which its definition declares:
///
///   auto evaluation = job::Evaluation::of(scores, targets);
///   evaluation.means["abs_error"] = (scores - targets).abs().sum().item<double>();
///   definition.metric("abs_error", "mean absolute error");  // a field of `eval` and of `end.eval`
struct Evaluation {
  int64_t samples = 0;
  std::optional<int64_t> right{};  ///< unset if the job counts none: it has no accuracy then
  double loss_sum = 0;
  /// Sums over the examples, by the metric's name. They are added up over all trainers; the totals
  /// in `means` are then divided by the total of `samples`.
  std::map<std::string, double> sums{}, means{};
  static constexpr auto kFields =
      std::tuple(&Evaluation::samples, &Evaluation::right, &Evaluation::loss_sum, &Evaluation::sums,
                 &Evaluation::means);
  /// By cross-entropy, of `scores` [n, classes] and int64 `targets` [n], wherever these are.
  static Evaluation of(const at::Tensor& scores, const at::Tensor& targets);
  void add(const Evaluation& other);
  /// `scores` [n, classes], the sum of whose losses is `loss_sum`; int64 `targets` [n].
  void add(const at::Tensor& scores, const at::Tensor& targets, double loss_sum);
  double loss() const { return loss_sum / static_cast<double>(samples); }
};

}  // namespace distrain::nn
