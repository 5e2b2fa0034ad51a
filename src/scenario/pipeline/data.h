#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "distrain/data/images.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/training.h"
#include "distrain/scenario/pipeline.h"

namespace distrain::scenario {

/// What the job reads before anything begins, and its batches: random ones (without `data`), or
/// images of CIFAR-10 or in IDX files.
///
/// Random: as in the tutorial, pixels of a standard normal distribution and labels below `classes`,
/// by (seed, batch) and nothing else. Images: epoch after epoch, see data::full_batch(); CIFAR-10
/// normalised by channel, grey images by 0.5 and 0.5, the one channel repeated.
class PipelineData {
 public:
  /// Reads the files; throws bad_data.
  explicit PipelineData(const PipelineOptions& options);
  /// Images to classify, of the kind that the checkpoint's model was trained on.
  PipelineData(const PipelineOptions& options, const job::Snapshot& snapshot,
               const std::string& images);

  /// The batch with this number, from 0 on; always of `batch_size` images.
  data::ImageBatch batch(int64_t index) const;
  /// That its images fill, at least 1. Not of random data.
  int64_t batches_per_epoch() const;

  /// Images to evaluate on after each epoch and at the end, if there are any.
  const data::ImageSet& valid() const { return valid_; }
  const data::ImageSet& test() const { return test_; }
  /// A share of such images in batches; labels are -1 where there are none.
  void each_batch(const data::ImageSet& images, const job::Share& share,
                  const std::function<void(const data::ImageBatch&)>& use) const;

  /// For checkpoints: data (random, cifar10, idx); for images also their number and normalisation.
  job::Json describe() const;
  /// Of the files' bytes; 0 of random data.
  uint64_t content_hash() const { return images_.content_hash; }
  /// That the model begins with; none: as it begins by itself.
  const data::NamedTensors& weights() const { return weights_; }

 private:
  const PipelineOptions options_;
  data::ImageSet images_;  // empty: random
  data::ImageSet valid_, test_;
  data::NamedTensors weights_;
};

}  // namespace distrain::scenario
