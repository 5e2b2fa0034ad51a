#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distrain/data/batches.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/training.h"
#include "options.h"
#include "random_bags.h"

namespace distrain::scenario {

/// Random batches, with random labels or a teacher's, or the batches of a fastText-format file.
class HybridData {
 public:
  /// Reads the files. Throws `bad_data`.
  explicit HybridData(const HybridOptions& options);
  /// Reads test examples with the vocabulary of a checkpoint. They need no labels.
  HybridData(const HybridOptions& options, const job::Snapshot& snapshot,
             const std::string& examples);

  /// Returns the number of rows of the embedding table.
  int64_t rows() const { return words_ ? words_->words.size() : options_.num_embeddings; }
  int64_t classes() const { return words_ ? std::ssize(words_->labels) : options_.classes; }
  /// Adds the data properties that all trainers must share, and the vocabulary for predict.
  void agree(job::TrainingPlan& training) const;
  int64_t steps_per_epoch() const {
    return sampler_ ? sampler_->steps_per_epoch() : options_.batches;
  }
  data::Batch batch(const job::Step& step);

  /// Has `training` evaluate the validation data after each epoch and the test data at the end.
  /// `forward` returns the scores of a batch. This object must outlive the training.
  void evaluate_in(job::TrainingPlan& training,
                   const std::function<at::Tensor(const data::Batch&)>& forward) const;
  bool evaluates_text() const { return words_ && (valid_ || test_); }
  /// Counts the words of validation and test data that the training data does not have.
  int64_t unknown_words() const;
  /// The test examples. Must not be called without any.
  const data::TextDataset& test() const { return *test_; }
  /// Calls `use` with batches of the examples of `share`.
  static void each_batch(const data::TextDataset& set, const job::Share& share,
                         const std::function<void(const data::Batch&)>& use);
  /// Must not be called without a file.
  const std::vector<std::string>& labels() const { return words_->labels; }

 private:
  const HybridOptions options_;
  const RandomBags bags_{options_.seed, options_.num_embeddings, options_.classes,
                         options_.has_teacher()};
  std::shared_ptr<const data::TextVocabulary> words_;  // null without a file
  std::optional<data::TextDataset> train_, valid_, test_;
  std::optional<data::Sampler> sampler_;  // of `train_`
};

}  // namespace distrain::scenario
