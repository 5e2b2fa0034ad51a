#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "distrain/data/batches.h"
#include "distrain/data/idx.h"
#include "distrain/job/training.h"
#include "distrain/scenario/ps.h"

namespace distrain::scenario {

struct ImageBatch {
  at::Tensor images;   ///< float [n, 1, 28, 28], normalised
  at::Tensor targets;  ///< int64 [n]
};

/// The share's images in batches that take no more memory than those of training; the target is -1
/// where there are no labels.
void each_batch(const PsOptions& options, const data::ImageSet& images, const job::Share& share,
                const std::function<void(const ImageBatch&)>& use);

/// `bad_data` unless they are 28 × 28 in ten classes; `path` is that of the images.
void check_images(const std::string& path, const data::ImageSet& images);

/// The batches of the job, from IDX files of 28 × 28 images in ten classes.
class PsData {
 public:
  /// Reads the files; throws bad_data.
  explicit PsData(const PsOptions& options);

  job::Plan plan() const;
  /// What all trainers must have read alike.
  void agree(job::TrainingPlan& training) const;
  ImageBatch batch(const job::Step& step);
  /// The share's test examples; `forward` gives a batch's log-probabilities.
  job::Evaluation evaluate(
      const job::Share& share,
      const std::function<at::Tensor(const at::Tensor& images)>& forward) const;

 private:
  const PsOptions options_;
  data::ImageFolder files_;
  int64_t examples_;
  data::Sampler sampler_;
};

/// The random numbers of one training step.
std::optional<uint64_t> dropout_key(const PsOptions& options, const job::Step& step);

}  // namespace distrain::scenario
