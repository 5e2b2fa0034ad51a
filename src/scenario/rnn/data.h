#pragma once

#include <optional>
#include <string>

#include "distrain/data/corpus.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/training.h"
#include "options.h"

namespace distrain::scenario {

using WordBatch = data::TokenColumns::Batch;

/// The text of the job, read in columns: trainer t of T reads batch_size of the T · batch_size
/// columns. Random words without a file.
class RnnData {
 public:
  /// Reads the files. Throws `bad_data`.
  explicit RnnData(const RnnOptions& options);
  /// Reads a text to evaluate with the vocabulary of a checkpoint.
  RnnData(const RnnOptions& options, const job::Snapshot& snapshot, const std::string& text);

  job::Plan plan() const;
  /// Adds the data properties that all trainers must share, and the vocabulary for predict.
  void agree(job::TrainingPlan& training) const;
  /// Returns the size of the vocabulary.
  int64_t words() const { return vocabulary_ ? vocabulary_->size() : options_.vocab_size; }
  WordBatch batch(const job::Step& step) const;

  /// The texts to evaluate after each epoch and at the end; the second constructor reads test().
  const data::Corpus& valid() const { return valid_; }
  const data::Corpus& test() const { return test_; }

  /// Must not be called without a file.
  const data::Vocabulary& vocabulary() const { return *vocabulary_; }

 private:
  data::TokenColumns columns_of(int trainer) const;

  const RnnOptions options_;
  std::optional<data::Vocabulary> vocabulary_;
  data::Corpus train_, valid_, test_;
};

}  // namespace distrain::scenario
