#include "distrain/data/batches.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>
#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"

namespace distrain::data {

// Selects the sequence of random numbers for shuffling. Jobs use other keys for other sequences.
constexpr uint64_t kShuffleSequence = 1;

static int64_t at_least_1(int64_t value, const char* what) {
  if (value < 1) base::invalid(fmt::format("{} must be at least 1, not {}", what, value));
  return value;
}

void check_enough(const std::string& path, int64_t examples, int64_t trainers) {
  if (examples >= trainers) return;
  base::bad_data(fmt::format("{}{} {} too few for {} trainers: --trainers can be {} at most",
                             path.empty() ? "" : path + ": ", examples,
                             examples == 1 ? "example is" : "examples are", trainers, examples));
}

Batch Batch::part(int64_t first, int64_t end) const {
  const auto start = [this](int64_t bag) {
    return bag < size() ? offsets[bag].item<int64_t>() : indices.numel();
  };
  const int64_t count = end - first, at = start(first);
  return {indices.narrow(0, at, start(end) - at), offsets.narrow(0, first, count) - at,
          targets.narrow(0, first, count),
          numbers.defined() ? numbers.narrow(0, first, count) : numbers};
}

Batch Batch::empty() {
  const at::Tensor none = at::empty({0}, at::kLong);
  return {none, none, none, at::empty({0, kCriteoNumbers}, at::kFloat)};
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

void append_batch(TextDataset& dataset, const Batch& batch) {
  const auto append = [](std::vector<int64_t>& to, const at::Tensor& from, int64_t add = 0) {
    const auto* const first = from.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < from.numel(); ++i) to.push_back(first[i] + add);
  };
  dataset.offsets.pop_back();  // the end of the last example
  append(dataset.offsets, batch.offsets, std::ssize(dataset.tokens));
  append(dataset.tokens, batch.indices);
  append(dataset.labels, batch.targets);
  dataset.offsets.push_back(std::ssize(dataset.tokens));
}

Sampler::Sampler(uint64_t seed, int trainers, int64_t examples, int64_t batch_size)
    : seed_(seed),
      trainers_(at_least_1(trainers, "the number of trainers")),
      examples_(examples),
      batch_size_(at_least_1(batch_size, "the batch size")),
      shard_size_((examples + trainers_ - 1) / trainers_) {}

std::span<const int64_t> Sampler::batch(int64_t epoch, int shard, int64_t step) {
  check_enough("", examples_, trainers_);
  if (shard < 0 || shard >= trainers_) {
    base::invalid(fmt::format("there is no trainer {} of {}", shard, trainers_));
  }
  if (step < 0 || step >= steps_per_epoch()) {
    base::invalid(fmt::format("an epoch of {} steps has no step {}", steps_per_epoch(), step));
  }
  if (epoch_ != epoch) shuffle(epoch);
  const int64_t first = step * batch_size_, count = std::min(batch_size_, shard_size_ - first);
  return std::span(of_epoch_).subspan(static_cast<size_t>(shard * shard_size_ + first),
                                      static_cast<size_t>(count));
}

void Sampler::shuffle(int64_t epoch) {
  std::vector<int64_t> all(static_cast<size_t>(examples_));
  std::iota(all.begin(), all.end(), 0);
  base::Random random({seed_, kShuffleSequence, static_cast<uint64_t>(epoch)});
  for (size_t left = all.size(); left > 1; --left) {
    std::swap(all[left - 1], all[random.below(left)]);
  }
  of_epoch_.clear();
  of_epoch_.reserve(static_cast<size_t>(trainers_ * shard_size_));
  for (int64_t shard = 0; shard < trainers_; ++shard) {
    for (int64_t i = 0; i < shard_size_; ++i) {
      const int64_t at = shard + i * trainers_;
      of_epoch_.push_back(all[static_cast<size_t>(at < examples_ ? at : shard)]);
    }
  }
  epoch_ = epoch;
}

}  // namespace distrain::data
