#include "distrain/data/batches.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"

namespace distrain::data {
namespace {

// Keys that derive independent random sequences from one seed.
constexpr uint64_t kShuffleSequence = 1;
constexpr uint64_t kBagSequence = 2;
constexpr uint64_t kTeacherSequence = 3;

void check_positive(int64_t value, const std::string& what) {
  if (value < 1) base::invalid(what + " must be at least 1, not " + std::to_string(value));
}

/// A batch under construction.
struct Bags {
  std::vector<int64_t> indices, offsets, targets;
  Batch batch() const {
    return {at::tensor(indices, at::kLong), at::tensor(offsets, at::kLong),
            at::tensor(targets, at::kLong)};
  }
};

}  // namespace

void check_enough(const std::string& path, int64_t examples, int trainers) {
  if (examples >= trainers) return;
  base::bad_data((path.empty() ? "" : path + ": ") + std::to_string(examples) +
                 (examples == 1 ? " example is too few for " : " examples are too few for ") +
                 std::to_string(trainers) + " trainers: --trainers can be " +
                 std::to_string(examples) + " at most");
}

Batch make_batch(const TextDataset& dataset, std::span<const int64_t> examples) {
  Bags bags;
  bags.offsets.reserve(examples.size());
  bags.targets.reserve(examples.size());
  const auto tokens = dataset.tokens.begin();
  for (const int64_t example : examples) {
    const auto i = static_cast<size_t>(example);
    bags.offsets.push_back(static_cast<int64_t>(bags.indices.size()));
    bags.indices.insert(bags.indices.end(), tokens + dataset.offsets[i],
                        tokens + dataset.offsets[i + 1]);
    bags.targets.push_back(dataset.labels[i]);
  }
  return bags.batch();
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

std::vector<int64_t> full_batch(uint64_t seed, int64_t index, int64_t examples,
                                int64_t batch_size) {
  std::vector<int64_t> batch;
  int64_t place = index * batch_size;  // position in the sequence of epochs
  while (place < (index + 1) * batch_size) {
    const EpochSampler epoch(seed, place / examples, {}, examples, examples);
    const auto rest = epoch.batch(0).subspan(static_cast<size_t>(place % examples));
    const auto wanted = static_cast<size_t>((index + 1) * batch_size - place);
    batch.insert(batch.end(), rest.begin(), rest.begin() + std::min(wanted, rest.size()));
    place += static_cast<int64_t>(std::min(wanted, rest.size()));
  }
  return batch;
}

Batch RandomBags::batch(int trainer, int64_t epoch, int64_t step) const {
  check_positive(num_embeddings, "the number of embeddings");
  check_positive(classes, "the number of classes");
  base::Random random({seed, kBagSequence, static_cast<uint64_t>(trainer),
                       static_cast<uint64_t>(epoch), static_cast<uint64_t>(step)});
  Bags bags;
  const int64_t count = random.between(20, 50);
  for (int64_t i = 0; i < count; ++i) bags.indices.push_back(random.between(0, num_embeddings - 1));
  for (int64_t start = 0; start < count; start += random.between(1, 10)) {
    bags.offsets.push_back(start);
  }
  for (size_t i = 0; i < bags.offsets.size(); ++i) {
    const int64_t first = bags.offsets[i];
    const int64_t end = i + 1 < bags.offsets.size() ? bags.offsets[i + 1] : count;
    const auto bag = std::span(bags.indices).subspan(first, end - first);
    bags.targets.push_back(has_teacher ? taught(bag) : random.between(0, classes - 1));
  }
  return bags.batch();
}

int64_t RandomBags::taught(std::span<const int64_t> bag) const {
  std::map<int64_t, double> weights;
  for (const int64_t index : bag) {
    base::Random random({seed, kTeacherSequence, static_cast<uint64_t>(index)});
    const int64_t label = random.between(0, classes - 1);
    weights[label] += random.unit();
  }
  return std::ranges::max_element(weights, {}, [](const auto& each) { return each.second; })->first;
}

}  // namespace distrain::data
