#include <algorithm>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/data/batches.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
namespace {

using Ints = std::vector<int64_t>;

base::ErrorKind kind_of(int trainers, int shard, int64_t examples, int64_t batch_size) {
  try {
    Sampler(1, trainers, examples, batch_size).batch(0, shard, 0);
  } catch (const base::Exception& exception) {
    return exception.kind();
  }
  return base::ErrorKind::kInternal;
}

// Returns all examples of one trainer's epoch, in order.
Ints epoch_of(Sampler sampler, int64_t epoch, int shard) {
  Ints all;
  for (int64_t step = 0; step < sampler.steps_per_epoch(); ++step) {
    const auto batch = sampler.batch(epoch, shard, step);
    all.insert(all.end(), batch.begin(), batch.end());
  }
  return all;
}

}  // namespace

TEST_CASE("The parts of a batch have its bags") {
  const Batch whole{at::tensor({7, 8, 9, 5, 6}, at::kLong), at::tensor({0, 2, 2, 4}, at::kLong),
                    at::tensor({0, 1, 0, 1}, at::kLong),
                    at::arange(52).view({4, 13}).to(at::kFloat)};
  const auto check = [&](int64_t first, int64_t end, const Ints& indices, const Ints& offsets) {
    const Batch part = whole.part(first, end);
    CHECK(part.size() == end - first);
    CHECK(at::equal(part.indices, at::tensor(indices, at::kLong)));
    CHECK(at::equal(part.offsets, at::tensor(offsets, at::kLong)));
    CHECK(at::equal(part.targets, whole.targets.narrow(0, first, end - first)));
    CHECK(at::equal(part.numbers, whole.numbers.narrow(0, first, end - first)));
  };
  check(0, 4, {7, 8, 9, 5, 6}, {0, 2, 2, 4});
  check(0, 2, {7, 8}, {0, 2});  // the second bag is empty
  check(1, 3, {9, 5}, {0, 0});
  check(3, 4, {6}, {0});
  check(4, 4, {}, {});
  check(2, 2, {}, {});
  CHECK(Batch::empty().part(0, 0).size() == 0);
}

TEST_CASE("Fewer examples than trainers are an error with the file and the option") {
  check_enough("f", 2, 2);
  const auto why = [](const std::string& path, int64_t examples) {
    try {
      check_enough(path, examples, 3);
    } catch (const base::Exception& exception) {
      return exception.error().message;
    }
    return std::string();
  };
  CHECK(why("f", 1) == "f: 1 example is too few for 3 trainers: --trainers can be 1 at most");
  CHECK(why("", 2) == "2 examples are too few for 3 trainers: --trainers can be 2 at most");
}

TEST_CASE("An epoch has every example once, disjoint over the trainers") {
  const int trainers = GENERATE(1, 2, 3, 5);
  const int64_t examples = GENERATE(5, 30, 31, 97);
  const int64_t batch_size = GENERATE(1, 4, 100);
  CAPTURE(trainers, examples, batch_size);
  const int64_t shard_size = (examples + trainers - 1) / trainers;
  Ints all;
  Sampler sampler(1, trainers, examples, batch_size);
  const int64_t steps = (shard_size + batch_size - 1) / batch_size;
  REQUIRE(sampler.steps_per_epoch() == steps);
  for (int trainer = 0; trainer < trainers; ++trainer) {
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t expected = step + 1 == steps ? shard_size - step * batch_size : batch_size;
      REQUIRE(std::ssize(sampler.batch(0, trainer, step)) == expected);
    }
    Ints own = epoch_of(sampler, 0, trainer);
    REQUIRE(static_cast<int64_t>(own.size()) == shard_size);
    if (examples - trainer * shard_size < 0 || trainer + (shard_size - 1) * trainers >= examples) {
      CHECK(own.back() == own.front());  // a short shard repeats its own examples
      own.pop_back();
    }
    all.insert(all.end(), own.begin(), own.end());
  }
  std::sort(all.begin(), all.end());
  REQUIRE(static_cast<int64_t>(all.size()) == examples);
  for (int64_t i = 0; i < examples; ++i) REQUIRE(all[static_cast<size_t>(i)] == i);
}

TEST_CASE("The order depends on epoch and seed and is reproducible") {
  const Ints first = epoch_of(Sampler(1, 2, 100, 8), 0, 1);
  CHECK(first == epoch_of(Sampler(1, 2, 100, 8), 0, 1));
  CHECK(first == epoch_of(Sampler(1, 2, 100, 32), 0, 1));
  CHECK(first != epoch_of(Sampler(1, 2, 100, 8), 1, 1));
  CHECK(first != epoch_of(Sampler(2, 2, 100, 8), 0, 1));
  // Checks one recorded order, because another shuffle would change the result of every run.
  CHECK(epoch_of(Sampler(1, 1, 8, 8), 0, 0) == Ints{0, 4, 1, 2, 3, 5, 7, 6});
}

TEST_CASE("The shuffle is uniform") {
  // Over many epochs, example 0 is at each of 10 positions about equally often.
  std::vector<int> places(10);
  Sampler sampler(5, 1, 10, 10);
  for (int epoch = 0; epoch < 10'000; ++epoch) {
    const auto order = sampler.batch(epoch, 0, 0);
    ++places[static_cast<size_t>(std::find(order.begin(), order.end(), 0) - order.begin())];
  }
  for (const int count : places) CHECK(std::abs(count - 1000) < 150);
}

TEST_CASE("A sampler returns batches in any order of epochs, shards and steps") {
  Sampler sampler(1, 3, 31, 4);
  for (const int epoch : {1, 1, 2, 1}) {
    for (int shard = 0; shard < 3; ++shard) {
      const Ints expected = epoch_of(Sampler(1, 3, 31, 4), epoch, shard);
      for (int64_t step = sampler.steps_per_epoch(); step-- > 0;) {
        const auto batch = sampler.batch(epoch, shard, step);
        CHECK(std::ranges::equal(batch, std::span(expected).subspan(4 * step, batch.size())));
      }
    }
  }
}

TEST_CASE("Impossible shards are refused") {
  CHECK(kind_of(1, 0, 10, 0) == base::ErrorKind::kInvalid);
  CHECK(kind_of(2, 2, 10, 4) == base::ErrorKind::kInvalid);
  CHECK(kind_of(2, -1, 10, 4) == base::ErrorKind::kInvalid);
  CHECK(kind_of(0, 0, 10, 4) == base::ErrorKind::kInvalid);
  CHECK(kind_of(3, 0, 2, 4) == base::ErrorKind::kBadData);
  CHECK(kind_of(1, 0, 0, 4) == base::ErrorKind::kBadData);
  Sampler sampler(1, 1, 10, 4);
  CHECK_THROWS_AS(sampler.batch(0, 0, 3), base::Exception);
  CHECK_THROWS_AS(sampler.batch(0, 0, -1), base::Exception);
}

TEST_CASE("A batch has the bags of its examples") {
  const TextDataset data =
      parse_fast_text("__label__b one two\n__label__a\n__label__a three\n__label__b\n", "f");
  const Ints examples = {2, 1, 0, 3};
  const Batch batch = make_batch(data, examples);
  CHECK(ints(batch.indices) == Ints{2, 0, 1});
  CHECK(ints(batch.offsets) == Ints{0, 1, 1, 3});  // the last bag begins at the end: it is empty
  CHECK(ints(batch.targets) == Ints{0, 0, 1, 1});
  CHECK(batch.size() == 4);
  const Batch some = make_batch(data, Ints{1, 2});
  CHECK(ints(some.indices) == Ints{2});
  CHECK(ints(some.offsets) == Ints{0, 0});
  CHECK(ints(some.targets) == Ints{0, 0});
}

}  // namespace distrain::data
