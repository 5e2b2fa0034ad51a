#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/text.h"

namespace distrain::data {

// The fields of an example of Format::kCriteo (stream.h), after its label.
inline constexpr int64_t kCriteoNumbers = 13;
inline constexpr int64_t kCriteoCategories = 26;

/// A batch in the layout of at::embedding_bag: bag b has indices[offsets[b] .. offsets[b + 1]), and
/// the last bag extends to the end. These three tensors are int64.
struct Batch {
  at::Tensor indices;
  at::Tensor offsets;  ///< the start of each bag in `indices`, ascending; offsets[0] is 0
  at::Tensor targets;  ///< the class of each bag
  /// Float, [size(), kCriteoNumbers], for data of Format::kCriteo (stream.h) and in empty();
  /// otherwise undefined.
  at::Tensor numbers{};

  int64_t size() const { return targets.numel(); }
  static constexpr auto kFields =
      std::tuple(&Batch::indices, &Batch::offsets, &Batch::targets, &Batch::numbers);

  /// Returns the bags `first` to `end` - 1.
  Batch part(int64_t first, int64_t end) const;
  /// Returns a batch without examples, for data of any format.
  static Batch empty();
};

/// Returns a batch of the examples of `dataset` at the indices `examples`, in their order.
Batch make_batch(const TextDataset& dataset, std::span<const int64_t> examples);

/// Adds the examples of `batch` to the end of `dataset`.
void append_batch(TextDataset& dataset, const Batch& batch);

/// Throws `bad_data`, with `path` in the message, if there are fewer examples than trainers.
void check_enough(const std::string& path, int64_t examples, int64_t trainers);

/// The batches of every trainer (shard) in every epoch.
///
/// A Fisher-Yates shuffle, by a `base::Random` keyed by seed and epoch, permutes all examples.
/// Trainer t of T gets the positions t, t + T, t + 2T, … of the permutation. Every shard has
/// ceil(examples / T) entries: a shorter one repeats its first example at its end. Step k of each
/// trainer therefore has the same number of examples: `batch_size`, or fewer in the last step.
class Sampler {
 public:
  /// Throws `invalid` if `trainers` or `batch_size` is below 1.
  Sampler(uint64_t seed, int trainers, int64_t examples, int64_t batch_size);

  int64_t steps_per_epoch() const { return (shard_size_ + batch_size_ - 1) / batch_size_; }
  /// Returns the examples of step `step` in [0, steps_per_epoch()). The span is valid until a batch
  /// of another epoch is requested. Throws `invalid` if there is no such shard or step, `bad_data`
  /// if there are fewer examples than trainers.
  std::span<const int64_t> batch(int64_t epoch, int shard, int64_t step);

 private:
  void shuffle(int64_t epoch);

  const uint64_t seed_;
  const int64_t trainers_, examples_, batch_size_, shard_size_;
  std::optional<int64_t> epoch_;   // the epoch of `of_epoch_`
  std::vector<int64_t> of_epoch_;  // the examples of all shards, one shard after the other
};

}  // namespace distrain::data
