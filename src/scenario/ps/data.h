#pragma once

#include <functional>
#include <optional>
#include <string>

#include "distrain/data/batches.h"
#include "distrain/data/images.h"
#include "distrain/job/training.h"
#include "distrain/scenario/ps.h"

namespace distrain::scenario {

/// The job's batches, float and normalised, from IDX files of 28 × 28 images in ten classes.
class PsData {
 public:
  /// Reads the files; throws bad_data.
  explicit PsData(const PsOptions& options);
  /// Test images; they need no labels.
  PsData(const PsOptions& options, const std::string& images);

  job::Plan plan() const;
  /// What all trainers must have read alike.
  void agree(job::TrainingPlan& training) const;
  data::ImageBatch batch(const job::Step& step);
  /// Has the validation images evaluated after each epoch and the test images at the end; `forward`
  /// gives the log-probabilities of a batch. To outlive the training.
  void evaluate_in(job::TrainingPlan& training,
                   const std::function<at::Tensor(const at::Tensor& images)>& forward) const;
  /// The images to evaluate at the end, where there are any.
  const data::ImageSet& test() const { return *test_; }
  /// The share's images of `set`, in batches that take no more memory than those of training.
  void each_batch(const data::ImageSet& set, const job::Share& share,
                  const std::function<void(const data::ImageBatch&)>& use) const;

 private:
  const PsOptions options_;
  const data::ImageForm form_{{options_.mean}, {options_.std}};
  data::ImageFolder files_;
  std::optional<data::ImageSet> valid_, test_;  // to evaluate on after each epoch, at the end
  int64_t examples_ = 0;                        // to train on
  data::Sampler sampler_;
};

/// The random numbers of one training step.
std::optional<uint64_t> dropout_key(const PsOptions& options, const job::Step& step);

}  // namespace distrain::scenario
