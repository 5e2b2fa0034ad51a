#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/corpus.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/training.h"
#include "distrain/scenario/rnn.h"

namespace distrain::scenario {

struct WordBatch {
  at::Tensor inputs;   ///< int64 [length, columns]
  at::Tensor targets;  ///< int64 [length · columns]: each word's next
  int64_t columns() const { return inputs.size(1); }
};

/// The text of the job, read in columns: trainer t of T has batch_size of the T · batch_size
/// columns. Random words without a file.
class RnnData {
 public:
  /// Reads the files; throws bad_data.
  explicit RnnData(const RnnOptions& options);
  /// A text to evaluate, in the words of a checkpoint.
  RnnData(const RnnOptions& options, const job::Snapshot& snapshot, const std::string& text);

  job::Plan plan() const;
  /// What all trainers must have read alike, and what it takes to use the model.
  void agree(job::TrainingPlan& training) const;
  /// In the vocabulary.
  int64_t words() const { return vocabulary_ ? vocabulary_->size() : options_.vocab_size; }
  WordBatch batch(int trainer, int64_t step) const;

  /// A share of the columns of the validation text; 0: it has none.
  int64_t valid_columns(const job::Share& share) const;
  int64_t valid_steps() const;
  WordBatch valid_batch(const job::Share& share, int64_t step) const;
  /// The words of its lines, without their ends.
  std::vector<std::vector<int64_t>> valid_lines() const;

  /// With a file only.
  const data::Vocabulary& vocabulary() const { return *vocabulary_; }

 private:
  void read_valid(const std::string& path);

  const RnnOptions options_;
  std::optional<data::Vocabulary> vocabulary_;
  data::Corpus train_;
  data::Corpus valid_;
  int64_t valid_total_columns_ = 0;
};

}  // namespace distrain::scenario
