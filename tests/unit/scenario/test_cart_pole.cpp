#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "cart_pole_trajectories.h"
#include "scenario/rl/environment.h"
#include "support/catch.h"

using namespace distrain;
using scenario::CartPole;
using scenario::Observation;

TEST_CASE("CartPole follows Gymnasium's recorded trajectories") {
  REQUIRE(testing::kCartPoleTrajectories.size() == 6);
  for (const auto& recorded : testing::kCartPoleTrajectories) {
    CAPTURE(recorded.policy);
    CartPole environment;
    environment.begin(recorded.initial);
    REQUIRE(recorded.actions.size() == recorded.observations.size());
    double reward = 0;
    for (size_t i = 0; i < recorded.actions.size(); ++i) {
      CAPTURE(i);
      const CartPole::Step step = environment.step(recorded.actions[i] - '0');
      for (size_t j = 0; j < step.observation.size(); ++j) {
        CAPTURE(j);
        // The tolerance is 1e-6 because the recorded values have seven digits.
        CHECK(std::abs(step.observation[j] - recorded.observations[i][j]) < 1e-6);
      }
      const bool last = i + 1 == recorded.actions.size();
      CHECK(step.terminated == (last && recorded.terminated));
      CHECK(step.truncated == (last && recorded.truncated));
      reward += step.reward;
    }
    CHECK(reward == recorded.reward);
  }
}

TEST_CASE("the initial state of an episode depends only on its key") {
  CartPole a, b;
  std::set<Observation> seen;
  Observation least{1, 1, 1, 1}, most{-1, -1, -1, -1};
  std::array<double, 4> sums{};
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    for (uint64_t environment = 0; environment < 10; ++environment) {
      for (uint64_t episode = 1; episode <= 10; ++episode) {
        const base::Random key({seed, environment, episode});
        const Observation first = a.reset(key);
        CHECK(b.reset(key) == first);
        b.step(1);
        seen.insert(first);
        for (size_t i = 0; i < first.size(); ++i) {
          least[i] = std::min(least[i], first[i]);
          most[i] = std::max(most[i], first[i]);
          sums[i] += first[i];
        }
      }
    }
  }
  CHECK(seen.size() == 1000);
  for (size_t i = 0; i < sums.size(); ++i) {
    CAPTURE(i);
    CHECK(least[i] >= -0.05F);
    CHECK(least[i] < -0.0495F);
    CHECK(most[i] <= 0.05F);
    CHECK(most[i] > 0.0495F);
    CHECK(std::abs(sums[i] / 1000) < 0.0037);  // four standard deviations of the mean
  }
}
