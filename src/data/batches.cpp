#include "distrain/data/batches.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"

namespace distrain::data {

namespace {

// Selects the sequence of random numbers for shuffling. Jobs use other keys for other sequences.
constexpr uint64_t kShuffleSequence = 1;

void check_positive(int64_t value, const std::string& what) {
  if (value < 1) base::invalid(what + " must be at least 1, not " + std::to_string(value));
}

}  // namespace

void check_enough(const std::string& path, int64_t examples, int trainers) {
  if (examples >= trainers) return;
  base::bad_data((path.empty() ? "" : path + ": ") + std::to_string(examples) +
                 (examples == 1 ? " example is too few for " : " examples are too few for ") +
                 std::to_string(trainers) + " trainers: --trainers can be " +
                 std::to_string(examples) + " at most");
}

Batch make_batch(const TextDataset& dataset, std::span<const int64_t> examples) {
  std::vector<int64_t> indices, offsets, targets;
  offsets.reserve(examples.size());
  targets.reserve(examples.size());
  const auto tokens = dataset.tokens.begin();
  for (const int64_t example : examples) {
    const auto i = static_cast<size_t>(example);
    offsets.push_back(static_cast<int64_t>(indices.size()));
    indices.insert(indices.end(), tokens + dataset.offsets[i], tokens + dataset.offsets[i + 1]);
    targets.push_back(dataset.labels[i]);
  }
  return {at::tensor(indices, at::kLong), at::tensor(offsets, at::kLong),
          at::tensor(targets, at::kLong)};
}

EpochSampler::EpochSampler(uint64_t seed, int64_t epoch, Shard shard, int64_t examples,
                           int64_t batch_size)
    : batch_size_(batch_size) {
  check_positive(batch_size, "the batch size");
  check_positive(shard.trainers, "the number of trainers");
  if (shard.trainer < 0 || shard.trainer >= shard.trainers) {
    base::invalid("there is no trainer " + std::to_string(shard.trainer) + " of " +
                  std::to_string(shard.trainers));
  }
  check_enough("", examples, shard.trainers);
  std::vector<int64_t> all(static_cast<size_t>(examples));
  std::iota(all.begin(), all.end(), 0);
  base::Random random({seed, kShuffleSequence, static_cast<uint64_t>(epoch)});
  for (size_t left = all.size(); left > 1; --left) {
    std::swap(all[left - 1], all[random.below(left)]);
  }
  const auto trainers = static_cast<size_t>(shard.trainers);
  const size_t size = (all.size() + trainers - 1) / trainers;
  examples_.reserve(size);
  for (size_t at = static_cast<size_t>(shard.trainer); at < all.size(); at += trainers) {
    examples_.push_back(all[at]);
  }
  if (examples_.size() < size) examples_.push_back(examples_.front());
}

std::span<const int64_t> EpochSampler::batch(int64_t step) const {
  const int64_t first = step * batch_size_;
  const int64_t size = std::ssize(examples_);
  if (step < 0 || first >= size) {
    base::invalid("an epoch of " + std::to_string(steps()) + " steps has no step " +
                  std::to_string(step));
  }
  const int64_t count = std::min(batch_size_, size - first);
  return std::span(examples_).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
}

int64_t steps_per_epoch(int64_t examples, int trainers, int64_t batch_size) {
  check_positive(batch_size, "the batch size");
  check_positive(trainers, "the number of trainers");
  const int64_t shard_size = (examples + trainers - 1) / trainers;
  return (shard_size + batch_size - 1) / batch_size;
}

std::span<const int64_t> Sampler::batch(int64_t epoch, int shard, int64_t step) {
  if (epoch_ != epoch) of_epoch_.clear();
  epoch_ = epoch;
  const auto [it, is_new] =
      of_epoch_.try_emplace(shard, seed_, epoch, Shard{shard, trainers_}, examples_, batch_size_);
  return it->second.batch(step);
}

}  // namespace distrain::data
