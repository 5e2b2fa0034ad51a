#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/idx.h"
#include "distrain/job/checkpoints.h"
#include "distrain/scenario/pipeline.h"

namespace distrain::scenario {

struct PipelineBatch {
  at::Tensor images;  ///< float [n, 3, image_size, image_size]
  at::Tensor labels;  ///< int64 [n]
};

/// The batches of the job: random ones (without `data`), or images of CIFAR-10 or in IDX files.
///
/// Random: as in the tutorial, pixels of a standard normal distribution and labels below `classes`,
/// by (seed, batch) and nothing else. Images: epoch after epoch, each shuffled by (seed, epoch), an
/// epoch's last batch filled up from the next one, so that an epoch counts as many batches as its
/// images fill; divided by 255, then normalised (CIFAR-10 by its
/// channels' mean and standard deviation; grey images by 0.5 and 0.5, the one channel repeated),
/// then resized as torchvision's Resize does it (bilinear, with antialias).
class PipelineData {
 public:
  /// Reads the files; throws bad_data.
  explicit PipelineData(const PipelineOptions& options);
  /// Images to classify, of the kind that the checkpoint's model was trained on.
  PipelineData(const PipelineOptions& options, const job::Snapshot& snapshot,
               const std::string& images);

  /// The batch with this number, from 0 on; always of `batch_size` images.
  PipelineBatch batch(int64_t index) const;
  /// That its images fill, at least 1. Not of random data.
  int64_t batches_per_epoch() const;

  /// The images of the second constructor, or test images of `valid_data`: how many, and some in
  /// their order, with labels of -1 where there are none.
  int64_t valid_count() const { return valid_images_.count; }
  PipelineBatch valid_batch(int64_t first, int64_t end) const;

  /// For checkpoints: data (random, cifar10, idx); for images also how many there are and how they
  /// are normalised.
  job::Json describe() const;
  /// Of the files' bytes; 0 of random data.
  uint64_t content_hash() const { return images_.content_hash; }

 private:
  void check_labels(const data::ImageSet& images, const std::string& path) const;
  PipelineBatch random_batch(int64_t index) const;
  std::vector<int64_t> examples_of(int64_t index) const;
  PipelineBatch batch_of(const data::ImageSet& set, const std::vector<int64_t>& examples) const;

  const PipelineOptions options_;
  data::ImageSet images_;  // empty: random
  data::ImageSet valid_images_;
};

}  // namespace distrain::scenario
