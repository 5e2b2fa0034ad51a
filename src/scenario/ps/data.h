#pragma once

#include <functional>
#include <optional>
#include <string>

#include "distrain/data/batches.h"
#include "distrain/data/images.h"
#include "distrain/job/training.h"
#include "options.h"

namespace distrain::scenario {

/// Batches of normalised 28 × 28 float images in ten classes, from IDX files.
class PsData {
 public:
  /// Reads the files. Throws `bad_data`.
  explicit PsData(const PsOptions& options);
  /// Reads test images, which need no labels.
  PsData(const PsOptions& options, const std::string& images);

  job::Plan plan() const;
  /// Adds the properties of the data that all trainers must share.
  void agree(job::TrainingPlan& training) const;
  data::ImageBatch batch(const job::Step& step);
  /// Has `training` evaluate the validation images after each epoch and the test images at the end.
  /// `forward` returns the log-probabilities of a batch. This object must outlive the training.
  void evaluate_in(job::TrainingPlan& training,
                   const std::function<at::Tensor(const at::Tensor& images)>& forward) const;
  /// The test images. Must not be called without any.
  const data::ImageSet& test() const { return *test_; }
  /// Calls `use` with batches of `share`, which take no more memory than training batches.
  void each_batch(const data::ImageSet& set, const job::Share& share,
                  const std::function<void(const data::ImageBatch&)>& use) const;

 private:
  const PsOptions options_;
  const data::ImageForm form_{{options_.mean}, {options_.std}};
  data::ImageFolder files_;
  std::optional<data::ImageSet> valid_, test_;  // evaluated after each epoch; at the end
  int64_t examples_ = 0;                        // number of training examples
  data::Sampler sampler_;
};

/// Returns the random key of dropout in one training step, or nullopt without dropout.
std::optional<uint64_t> dropout_key(const PsOptions& options, const job::Step& step);

}  // namespace distrain::scenario
