#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>

#include "distrain/optim/update_rule.h"
#include "distrain/scenario/hybrid.h"
#include "hybrid_data.h"

namespace distrain::scenario {

/// The parameter server's module: the sum of the rows of a bag's words (EmbeddingBag, mode sum).
/// Its gradient is sparse: only the rows that were looked up travel and change.
class EmbeddingTable {
 public:
  /// `range` 0: rows from N(0, 1), as torch.nn.EmbeddingBag's; else uniform in ±range.
  using Constructor = EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed);
  EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed);

  /// int64 indices [n], offsets [bags] → float [bags, dim].
  at::Tensor forward(at::Tensor indices, at::Tensor offsets);
  std::vector<at::Tensor> parameters() { return {weight_}; }

 private:
  at::Tensor weight_;
};

/// As fastText's for real text, so that the sum over a long one does not drown the rest; the
/// tutorial's for random batches.
double embedding_range(const HybridOptions& options);

/// The trainers' module, the same for the same seed.
torch::nn::Linear make_dense(const HybridOptions& options, int64_t classes);

optim::OptimizerOptions optimizer_options(const HybridOptions& options);

/// How many of the batch the logits get right, and the sum of its losses.
struct Evaluation {
  int64_t samples = 0;
  int64_t right = 0;
  double loss_sum = 0;
  static constexpr auto kFields =
      std::tuple(&Evaluation::samples, &Evaluation::right, &Evaluation::loss_sum);
  void add(const Evaluation& other);
  void add(const at::Tensor& logits, const at::Tensor& targets);
  Json fields() const;  ///< loss, accuracy, samples
};

/// `not_finite`, naming where, unless it is a number.
double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step);

/// Emits a trainer's `step` and `epoch` lines, and counts for `end`.
class TrainLog {
 public:
  TrainLog(const HybridOptions& options, EventSink& sink) : options_(options), sink_(sink) {}

  void begin_epoch(int64_t epoch);
  void step(double loss, int64_t samples);
  void end_epoch();

  double last_loss() const { return last_loss_; }  ///< mean of the last epoch
  int64_t steps() const { return total_steps_; }
  double train_s() const { return train_s_; }  ///< first step to last

 private:
  const HybridOptions& options_;
  EventSink& sink_;
  std::chrono::steady_clock::time_point first_{};
  std::chrono::steady_clock::time_point epoch_start_;
  std::chrono::steady_clock::time_point last_line_;
  int64_t epoch_ = 0;
  int64_t total_steps_ = 0;
  int64_t steps_ = 0;         // of this epoch
  int64_t samples_ = 0;       // of this epoch
  int64_t line_samples_ = 0;  // since the last line
  double loss_sum_ = 0;
  double last_loss_ = 0;
  double train_s_ = 0;
};

}  // namespace distrain::scenario
