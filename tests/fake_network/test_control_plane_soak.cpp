// ctest: labels=soak timeout=600
#include "expect.h"

namespace distrain::fake_network {

TEST_CASE("500 jobs of 100 ranks with random faults satisfy the invariants") {
  for (uint64_t seed = 1000; seed < 1500; ++seed) expect_good(Scenario::many(seed, 100));
}

TEST_CASE("2,000 jobs of any size with random faults satisfy the invariants") {
  for (uint64_t seed = 1000; seed < 3000; ++seed) expect_good(Scenario::many(seed, 0));
}

TEST_CASE("200 jobs of 100 ranks and 2,000 of any size with losses satisfy the invariants") {
  for (uint64_t seed = 1000; seed < 1200; ++seed) expect_good(Scenario::tolerant(seed, 100));
  for (uint64_t seed = 1000; seed < 3000; ++seed) expect_good(Scenario::tolerant(seed, 0));
}

TEST_CASE("each kind of fault alone, 20 times in each phase, satisfies the invariants") {
  for (int kind = 0; kind < kFaultKinds; ++kind) {
    for (int phase = 0; phase < 4; ++phase) {
      for (uint64_t seed = 1000; seed < 1020; ++seed) {
        expect_good(
            Scenario::one(seed, 100, static_cast<FaultKind>(kind), static_cast<Phase>(phase)));
      }
    }
  }
}

}  // namespace distrain::fake_network
