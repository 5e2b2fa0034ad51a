#include <vector>

#include "distrain/base/random.h"
#include "support/catch.h"

namespace distrain::base {

TEST_CASE("The sequence of random numbers is fixed") {
  // The first values of SplitMix64 from state 0. Its authors' own test has the first of them, too.
  Random random({});
  CHECK(random.next() == 0xE220A8397B1DCDAFULL);
  CHECK(random.next() == 0x6E789E6AA1B965F4ULL);
  CHECK(Random({1, 2}).next() != Random({2, 1}).next());
  CHECK(Random({1}).next() != Random({1, 0}).next());
  CHECK(Random({0}).next() != Random({}).next());
}

TEST_CASE("Bounded random numbers are uniform") {
  Random random({3});
  std::vector<int> counts(6);
  for (int i = 0; i < 60'000; ++i) ++counts[random.below(6)];
  for (const int count : counts) CHECK(std::abs(count - 10'000) < 400);
  for (int i = 0; i < 100; ++i) CHECK(random.below(1) == 0);
  CHECK(random.below(~uint64_t{0}) < ~uint64_t{0});
}

}  // namespace distrain::base
