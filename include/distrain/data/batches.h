#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/text_dataset.h"

namespace distrain::data {

/// What one step of a bag-of-words model eats, as at::embedding_bag wants it: bag b holds
/// indices[offsets[b] .. offsets[b + 1]); the last goes to the end. All int64.
struct Batch {
  at::Tensor indices;
  at::Tensor offsets;  ///< one a bag, offsets[0] = 0, rising
  at::Tensor targets;  ///< one a bag: the class

  int64_t size() const { return targets.numel(); }
};

/// The batch of these examples (their numbers in `dataset`), in this order.
Batch make_batch(const TextDataset& dataset, std::span<const int64_t> examples);

/// Which part of an epoch is whose. The same in every process and on every machine.
struct Shard {
  int trainer = 0;
  int trainers = 1;
};

/// One trainer's batches of one epoch.
///
/// All examples are permuted by Fisher and Yates' shuffle (`base::Random` keyed by seed and epoch);
/// trainer t of T gets those at the places t, t + T, t + 2T, … of the permutation. Shards are
/// disjoint and differ by at most one example. A short one wraps around: its first example comes
/// once more at its end. So every shard has ceil(examples / T) entries, every trainer makes the
/// same number of steps, and its step k has as many examples as any other trainer's step k:
/// batch_size, fewer in the last step only.
class EpochSampler {
 public:
  /// Throws `invalid` for arguments out of range, `bad_data` for fewer examples than trainers.
  EpochSampler(uint64_t seed, int64_t epoch, Shard shard, int64_t examples, int64_t batch_size);

  int64_t steps() const { return (std::ssize(examples_) + batch_size_ - 1) / batch_size_; }

  /// The examples of step `step` in [0, steps()); valid as long as this object.
  std::span<const int64_t> batch(int64_t step) const;

 private:
  std::vector<int64_t> examples_;  // of this shard, in the order of their use
  int64_t batch_size_;
};

/// Throws `bad_data`, with the path, if there are fewer examples than trainers.
void check_enough(const std::string& path, int64_t examples, int trainers);

/// EpochSampler::steps() without making one.
int64_t steps_per_epoch(int64_t examples, int trainers, int64_t batch_size);

/// Batches of every epoch and shard, by an EpochSampler for each.
class Sampler {
 public:
  Sampler(uint64_t seed, int trainers, int64_t examples, int64_t batch_size)
      : seed_(seed), trainers_(trainers), examples_(examples), batch_size_(batch_size) {}

  int64_t steps_per_epoch() const {
    return data::steps_per_epoch(examples_, trainers_, batch_size_);
  }
  /// Valid until one of another epoch is asked for.
  std::span<const int64_t> batch(int64_t epoch, int shard, int64_t step);

 private:
  uint64_t seed_;
  int trainers_;
  int64_t examples_, batch_size_;
  int64_t epoch_ = 0;
  std::map<int, EpochSampler> of_epoch_;  // by shard, made when they are asked for
};

/// The examples of batch `index` of epochs that come one after the other, each shuffled by (seed,
/// epoch): all batches are full, an epoch's last one is filled up from the next epoch.
std::vector<int64_t> full_batch(uint64_t seed, int64_t index, int64_t examples, int64_t batch_size);

/// The random batches of PyTorch's hybrid tutorial.
struct RandomBags {
  uint64_t seed = 1;
  int64_t num_embeddings = 100;
  int64_t classes = 8;
  bool has_teacher = false;  ///< targets follow from the indices; otherwise they are random

  /// 20 to 50 indices, offsets from 0 in random steps of 1 to 10 (so no bag is empty), and targets.
  /// Depends on the numbers given and nothing else.
  Batch batch(int trainer, int64_t epoch, int64_t step) const;
  /// Returns the label that the hidden teacher gives to `bag`. The teacher draws a class and a
  /// weight for each index; the label is the class with the largest total weight. A sum of
  /// embeddings and a linear layer can represent the teacher if a row has at least as many numbers
  /// as there are classes.
  int64_t taught(std::span<const int64_t> bag) const;
};

}  // namespace distrain::data
