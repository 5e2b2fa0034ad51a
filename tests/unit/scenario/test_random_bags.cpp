#include <set>
#include <vector>

#include "distrain/base/error.h"
#include "scenario/hybrid/hybrid.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::scenario {

using testing::ints;

using Ints = std::vector<int64_t>;

TEST_CASE("Random bags have the distribution of the PyTorch tutorial") {
  const RandomBags bags{1, 100, 8};
  std::set<size_t> sizes;
  std::set<int64_t> steps, indices, targets;
  for (int64_t step = 0; step < 1000; ++step) {
    const data::Batch batch = bags.batch(0, 0, step);
    const Ints words = ints(batch.indices), starts = ints(batch.offsets);
    const Ints classes = ints(batch.targets);
    REQUIRE(starts.size() == classes.size());
    REQUIRE(starts.front() == 0);
    REQUIRE(starts.back() < static_cast<int64_t>(words.size()));
    sizes.insert(words.size());
    indices.insert(words.begin(), words.end());
    targets.insert(classes.begin(), classes.end());
    for (size_t i = 1; i < starts.size(); ++i) steps.insert(starts[i] - starts[i - 1]);
  }
  CHECK((*sizes.begin() == 20 && *sizes.rbegin() == 50 && sizes.size() == 31));
  CHECK((*steps.begin() == 1 && *steps.rbegin() == 10));
  CHECK((*indices.begin() == 0 && *indices.rbegin() == 99));
  CHECK((*targets.begin() == 0 && *targets.rbegin() == 7));
}

TEST_CASE("Random bags depend only on seed, trainer, epoch and step") {
  const auto indices = [](const data::Batch& batch) { return ints(batch.indices); };
  const RandomBags bags{1, 100, 8};
  const Ints first = indices(bags.batch(0, 0, 0));
  CHECK(first == indices(bags.batch(0, 0, 0)));
  CHECK(first != indices(bags.batch(1, 0, 0)));
  CHECK(first != indices(bags.batch(0, 1, 0)));
  CHECK(first != indices(bags.batch(0, 0, 1)));
  CHECK(first != indices(RandomBags{2, 100, 8}.batch(0, 0, 0)));
  CHECK_THROWS_AS((RandomBags{1, 0, 8}.batch(0, 0, 0)), base::Exception);
  CHECK_THROWS_AS((RandomBags{1, 100, 0}.batch(0, 0, 0)), base::Exception);
}

TEST_CASE("a hidden teacher labels equal bags equally: labels depend only on indices and seed") {
  const RandomBags bags{1, 100, 8, true};
  const data::Batch taught = bags.batch(1, 2, 3), random = RandomBags{1, 100, 8}.batch(1, 2, 3);
  const Ints indices = ints(taught.indices), offsets = ints(taught.offsets);
  CHECK((indices == ints(random.indices) && offsets == ints(random.offsets)));
  CHECK(ints(taught.targets) != ints(random.targets));
  const std::span<const int64_t> first(indices.data(), static_cast<size_t>(offsets[1]));
  CHECK(bags.taught(first) == ints(taught.targets)[0]);
  std::set<int64_t> labels;
  bool depends_on_seed = false;
  for (int64_t index = 0; index < 100; ++index) {
    const Ints once{index}, thrice{index, index, index};
    labels.insert(bags.taught(once));
    CHECK(bags.taught(thrice) == bags.taught(once));
    depends_on_seed =
        depends_on_seed || RandomBags{2, 100, 8, true}.taught(once) != bags.taught(once);
  }
  CHECK(labels.size() == 8);
  CHECK(depends_on_seed);
}

}  // namespace distrain::scenario
