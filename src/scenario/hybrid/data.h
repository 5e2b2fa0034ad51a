#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include "distrain/data/batches.h"
#include "distrain/data/text_dataset.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/training.h"
#include "distrain/scenario/hybrid.h"

namespace distrain::scenario {

/// What the model has to know of the data.
struct HybridDataInfo {
  int64_t rows = 0;  ///< of the embedding table
  int64_t classes = 0;
};

/// A batch as the model takes it; all int64.
struct HybridBatch {
  at::Tensor indices;  ///< rows of the table, all bags one after the other
  at::Tensor offsets;  ///< where each bag begins
  at::Tensor targets;  ///< the class of each bag

  HybridBatch on(c10::Device device) const;
};

/// The batches of the job: random, or of a file in fastText's format.
class HybridData {
 public:
  /// Reads the files; throws bad_data.
  explicit HybridData(const HybridOptions& options);
  /// Test examples in the words of a checkpoint; they need no label.
  HybridData(const HybridOptions& options, const job::Snapshot& snapshot,
             const std::string& examples);

  HybridDataInfo info() const;
  /// What all trainers must have read alike, and what it takes to use the model.
  void agree(job::TrainingPlan& training) const;
  int64_t steps_per_epoch() const;
  HybridBatch batch(int trainer, int64_t epoch, int64_t step);

  /// Has the validation data evaluated after each epoch and the test data at the end; `forward`
  /// gives a batch's scores. To outlive the training.
  void evaluate_in(job::TrainingPlan& training,
                   const std::function<at::Tensor(const HybridBatch&)>& forward) const;
  /// The share's test examples.
  void each_test_batch(const job::Share& share,
                       const std::function<void(const HybridBatch&)>& use) const;
  /// With a file only.
  const std::vector<std::string>& labels() const { return text()->vocabulary->labels; }

 private:
  /// Null: there is no file.
  const data::TextDataset* text() const { return train_ ? &*train_ : test_ ? &*test_ : nullptr; }

  const HybridOptions options_;
  std::optional<data::TextDataset> train_;
  std::optional<data::TextDataset> valid_;
  std::optional<data::TextDataset> test_;
  std::optional<data::Sampler> sampler_;  // of what is read
};

}  // namespace distrain::scenario
