#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distrain/data/batches.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/training.h"
#include "distrain/scenario/hybrid.h"

namespace distrain::scenario {

/// The batches of the job: random, with random labels or a teacher's, or of a file in fastText's
/// format.
class HybridData {
 public:
  /// Reads the files; throws bad_data.
  explicit HybridData(const HybridOptions& options);
  /// Test examples in the words of a checkpoint; they need no label.
  HybridData(const HybridOptions& options, const job::Snapshot& snapshot,
             const std::string& examples);

  /// Of the embedding table.
  int64_t rows() const { return words_ ? words_->words.size() : options_.num_embeddings; }
  int64_t classes() const { return words_ ? std::ssize(words_->labels) : options_.classes; }
  /// What all trainers must have read alike, and what it takes to use the model.
  void agree(job::TrainingPlan& training) const;
  int64_t steps_per_epoch() const {
    return sampler_ ? sampler_->steps_per_epoch() : options_.batches;
  }
  data::Batch batch(const job::Step& step);

  /// Has the validation data evaluated after each epoch and the test data at the end; `forward`
  /// gives a batch's scores. To outlive the training.
  void evaluate_in(job::TrainingPlan& training,
                   const std::function<at::Tensor(const data::Batch&)>& forward) const;
  bool evaluates_text() const { return words_ && (valid_ || test_); }
  /// Counts the words of validation and test data that the training data does not have.
  int64_t unknown_words() const;
  /// The examples to evaluate at the end, where there are any.
  const data::TextDataset& test() const { return *test_; }
  /// The share's examples of `set`.
  static void each_batch(const data::TextDataset& set, const job::Share& share,
                         const std::function<void(const data::Batch&)>& use);
  /// With a file only.
  const std::vector<std::string>& labels() const { return words_->labels; }

 private:
  const HybridOptions options_;
  const data::RandomBags bags_{options_.seed, options_.num_embeddings, options_.classes,
                               options_.has_teacher()};
  std::shared_ptr<const data::TextVocabulary> words_;  // null: there is no file
  std::optional<data::TextDataset> train_, valid_, test_;
  std::optional<data::Sampler> sampler_;  // of what is read
};

}  // namespace distrain::scenario
