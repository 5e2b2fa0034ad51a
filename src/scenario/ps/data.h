#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

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
  ImageBatch gather(const data::ImageSet& set, std::span<const int64_t> examples) const;

  const PsOptions options_;
  data::ImageFolder files_;
  int64_t examples_;
  data::Sampler sampler_;
};

/// The random numbers of one training step.
std::optional<uint64_t> dropout_key(const PsOptions& options, const job::Step& step);

}  // namespace distrain::scenario
