#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/text.h"

namespace distrain::data {

/// A batch in the layout of at::embedding_bag: bag b has indices[offsets[b] .. offsets[b + 1]), and
/// the last bag extends to the end. All tensors are int64.
struct Batch {
  at::Tensor indices;
  at::Tensor offsets;  ///< the start of each bag in `indices`, ascending; offsets[0] is 0
  at::Tensor targets;  ///< the class of each bag

  int64_t size() const { return targets.numel(); }
};

/// Returns a batch of the examples of `dataset` at the indices `examples`, in their order.
Batch make_batch(const TextDataset& dataset, std::span<const int64_t> examples);

/// The part of an epoch's examples that trainer `trainer` (from 0) of `trainers` trains on.
struct Shard {
  int trainer = 0;
  int trainers = 1;
};

/// The batches of one trainer in one epoch.
///
/// A Fisher-Yates shuffle, by a `base::Random` keyed by seed and epoch, permutes all examples.
/// Trainer t of T gets the positions t, t + T, t + 2T, … of the permutation. Every shard has
/// ceil(examples / T) entries: a shorter one repeats its first example at its end. Step k of each
/// trainer therefore has the same number of examples: `batch_size`, or fewer in the last step.
class EpochSampler {
 public:
  /// Throws `invalid` if an argument is out of range, `bad_data` if `examples` < `shard.trainers`.
  EpochSampler(uint64_t seed, int64_t epoch, Shard shard, int64_t examples, int64_t batch_size);

  int64_t steps() const { return (std::ssize(examples_) + batch_size_ - 1) / batch_size_; }

  /// Returns the examples of step `step` in [0, steps()). The span is valid as long as this object.
  std::span<const int64_t> batch(int64_t step) const;

 private:
  std::vector<int64_t> examples_;  // of this shard, in training order
  int64_t batch_size_;
};

/// Throws `bad_data`, with `path` in the message, if there are fewer examples than trainers.
void check_enough(const std::string& path, int64_t examples, int trainers);

/// Returns EpochSampler::steps() for these arguments.
int64_t steps_per_epoch(int64_t examples, int trainers, int64_t batch_size);

/// The batches of every trainer (shard) in every epoch, as an EpochSampler computes them.
class Sampler {
 public:
  Sampler(uint64_t seed, int trainers, int64_t examples, int64_t batch_size)
      : seed_(seed), trainers_(trainers), examples_(examples), batch_size_(batch_size) {}

  int64_t steps_per_epoch() const {
    return data::steps_per_epoch(examples_, trainers_, batch_size_);
  }
  /// Returns the examples of a step. The span is valid until a batch of another epoch is requested.
  std::span<const int64_t> batch(int64_t epoch, int shard, int64_t step);

 private:
  uint64_t seed_;
  int trainers_;
  int64_t examples_, batch_size_;
  int64_t epoch_ = 0;
  std::map<int, EpochSampler> of_epoch_;  // samplers for `epoch_`, by shard
};

}  // namespace distrain::data
