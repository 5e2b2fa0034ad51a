#include "random_bags.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"

namespace distrain::scenario {
namespace {

// Keys that derive independent random sequences from one seed.
constexpr uint64_t kBagSequence = 2;
constexpr uint64_t kTeacherSequence = 3;

void check_positive(int64_t value, const std::string& what) {
  if (value < 1) base::invalid(what + " must be at least 1, not " + std::to_string(value));
}

}  // namespace

data::Batch RandomBags::batch(int trainer, int64_t epoch, int64_t step) const {
  check_positive(num_embeddings, "the number of embeddings");
  check_positive(classes, "the number of classes");
  base::Random random({seed, kBagSequence, static_cast<uint64_t>(trainer),
                       static_cast<uint64_t>(epoch), static_cast<uint64_t>(step)});
  std::vector<int64_t> indices, offsets, targets;
  const int64_t count = random.between(20, 50);
  for (int64_t i = 0; i < count; ++i) indices.push_back(random.between(0, num_embeddings - 1));
  for (int64_t start = 0; start < count; start += random.between(1, 10)) {
    offsets.push_back(start);
  }
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int64_t first = offsets[i];
    const int64_t end = i + 1 < offsets.size() ? offsets[i + 1] : count;
    const auto bag = std::span(indices).subspan(first, end - first);
    targets.push_back(has_teacher ? taught(bag) : random.between(0, classes - 1));
  }
  return {at::tensor(indices, at::kLong), at::tensor(offsets, at::kLong),
          at::tensor(targets, at::kLong)};
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

}  // namespace distrain::scenario
