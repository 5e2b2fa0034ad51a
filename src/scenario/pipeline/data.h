#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "distrain/data/images.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/training.h"
#include "options.h"

namespace distrain::scenario {

/// Returns the examples of batch `index` in a sequence of epochs, each shuffled by `seed` and its
/// number. All batches are full: the next epoch fills up the last batch of an epoch.
std::vector<int64_t> full_batch(uint64_t seed, int64_t index, int64_t examples, int64_t batch_size);

/// The batches of the job and its initial weights: random images without `data`, otherwise images
/// from CIFAR-10 or IDX files.
///
/// Random images have, as in the tutorial, standard normal pixels and labels below `classes`; they
/// depend only on the seed and the batch. Files are read epoch after epoch: see full_batch().
/// CIFAR-10 is normalised by channel, grey images by 0.5 and 0.5, with the channel repeated.
class PipelineData {
 public:
  /// Reads the files. Throws `bad_data`.
  explicit PipelineData(const PipelineOptions& options);
  /// Reads images to classify, in the format that the model of the checkpoint was trained on.
  PipelineData(const PipelineOptions& options, const job::Snapshot& snapshot,
               const std::string& images);

  /// Returns batch `index`, from 0, which always has `batch_size` images.
  data::ImageBatch batch(int64_t index) const;
  /// Returns the number of full batches per epoch, at least 1. Not for random data.
  int64_t batches_per_epoch() const;

  /// The images to evaluate after each epoch and at the end; may be empty.
  const data::ImageSet& valid() const { return valid_; }
  const data::ImageSet& test() const { return test_; }
  /// Calls `use` with batches of the share; labels are -1 if the images have none.
  void each_batch(const data::ImageSet& images, const job::Share& share,
                  const std::function<void(const data::ImageBatch&)>& use) const;

  /// Returns the format (random, cifar10, idx), and the number and normalisation of images.
  job::Json describe() const;
  /// The hash of the files; 0 for random data.
  uint64_t content_hash() const { return images_.content_hash; }
  /// The initial weights; empty: the model initialises itself.
  const rpc::NamedTensors& weights() const { return weights_; }

 private:
  const PipelineOptions options_;
  data::ImageSet images_;  // empty: random images
  data::ImageSet valid_, test_;
  rpc::NamedTensors weights_;
};

}  // namespace distrain::scenario
