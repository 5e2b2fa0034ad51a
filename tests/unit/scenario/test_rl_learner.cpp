#include <cmath>

#include <ATen/Functions.h>
#include <torch/optim/adam.h>

#include "distrain/base/error.h"
#include "scenario/rl/rl.h"
#include "support/catch.h"
#include "support/scenario_job.h"
#include "support/torch_policy.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::ActionRequest;
using scenario::Actions;
using scenario::Learner;
using scenario::Policy;
using scenario::PolicyStep;
using scenario::RlOptions;

TEST_CASE("later rewards are discounted, and not added beyond the end of an episode") {
  CHECK(scenario::discounted_returns({1, 1, 1}, 0.5) == std::vector<double>{1.75, 1.5, 1});
  CHECK(scenario::discounted_returns({0, 0, 8}, 0.5) == std::vector<double>{2, 4, 8});
  CHECK(scenario::discounted_returns({3, 5}, 0) == std::vector<double>{3, 5});
  CHECK(scenario::discounted_returns({}, 0.9).empty());
}

TEST_CASE("returns are normalised as in the tutorial") {
  std::vector<double> values = {1, 2, 5, -3, 0.5};
  const at::Tensor before = at::tensor(values, at::kDouble);
  scenario::normalise(values);
  const at::Tensor expected = (before - before.mean()) / (before.std() + 1.1920929e-07);
  for (size_t i = 0; i < values.size(); ++i) {
    CHECK(values[i] == Approx(expected[static_cast<int64_t>(i)].item<double>()));
  }
  values = {7};
  scenario::normalise(values);
  CHECK(values == std::vector<double>{0});
  values = {4, 4, 4};
  scenario::normalise(values);
  CHECK(values == std::vector<double>{0, 0, 0});
}

namespace {

struct Learners {
  Learners() {
    options.observers = 2;
    options.envs_per_observer = 2;
    options.log_interval = 1;
  }

  // Plays an episode of three steps in each environment. `last` has the rewards of the last step.
  // If `together`, one call of choose() serves the requests of both observers.
  static void play(Learner& learner, int64_t episode, const std::vector<double>& last,
                   bool together) {
    learner.begin_episode(episode);
    for (int step = 0; step < 3; ++step) {
      std::vector<ActionRequest> requests;
      for (int observer = 0; observer < 2; ++observer) {
        ActionRequest request{observer, {}};
        for (uint32_t e = 0; e < 2; ++e) {
          const auto x = static_cast<float>(observer + 2 * step) - static_cast<float>(e);
          request.states.push_back({e, {x, 0.5F, -x, 1}, 1});
        }
        requests.push_back(request);
      }
      if (together) {
        CHECK(learner.choose(requests).size() == 2);
      } else {
        for (const auto& request : {requests[1], requests[0]}) learner.choose({request});
      }
    }
    for (int observer = 0; observer < 2; ++observer) {
      const auto at = static_cast<size_t>(2 * observer);
      learner.report(observer, {{0, {}, last[at]}, {1, {}, last[at + 1]}});
    }
    learner.end_episode();
  }

  RlOptions options;
};

}  // namespace

TEST_CASE_METHOD(Learners, "the reward of an episode is that of its worst environment") {
  std::vector<job::Json> lines;
  Listener sink(events_of<RlOptions>(), [&](const Line& line) { lines.push_back(line.fields); });
  options.threshold = 10;
  Learner learner(options, c10::kCPU, sink);
  play(learner, 1, {5, 4, 3, 9}, true);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0]["episode"] == 1);
  CHECK(lines[0]["reward"] == 5);
  CHECK(lines[0]["running_reward"].get<double>() == Approx(0.25));
  CHECK(lines[0]["steps"] == 12);
  CHECK_FALSE(learner.solved());
  CHECK(contains(learner.what_is_missing(1), "not solved after 1 episodes"));
  CHECK(contains(learner.what_is_missing(1), "is 0.2, not above 10"));
  play(learner, 2, {998, 998, 998, 998}, true);
  CHECK(lines[1]["running_reward"].get<double>() == Approx(50.2375));
  CHECK(learner.solved());
  job::Json fields;
  learner.add_to(fields, 2);
  CHECK(fields["solved"] == true);
  CHECK(fields["episodes"] == 2);
  CHECK(fields["steps"] == 24);
}

TEST_CASE_METHOD(Learners, "learning does not depend on which requests were answered together") {
  NamedTensors learned[2];
  for (const bool together : {true, false}) {
    Listener nobody(events_of<RlOptions>());
    Learner learner(options, c10::kCPU, nobody);
    for (int64_t episode = 1; episode <= 5; ++episode) {
      play(learner, episode, {1, 2, 3, 4}, together);
    }
    learned[together] = learner.policy().named_parameters();
    learned[together].merge(optim::flatten(Policy::names(), learner.optimizer().state()));
  }
  REQUIRE(learned[0].size() == 4 * 4);  // parameters, their moments and steps
  check_close(learned[0], learned[1], 0);
}

TEST_CASE_METHOD(Learners, "the learner computes what LibTorch's autograd and Adam compute") {
  // The rewards by observer, environment and step. Episodes have different lengths.
  const std::vector<double> all_rewards[2][2] = {{{1, 2, 0.5, 3, 1}, {4, -1, 2}},
                                                 {{0.25}, {1, 1, 1, 1}}};
  options.gamma = 0.9;
  options.lr = 0.02;
  Listener nobody(events_of<RlOptions>());
  Learner learner(options, c10::kCPU, nobody);
  const std::vector<at::Tensor> parameters = torch_parameters(Policy(options.seed));
  torch::optim::Adam adam(parameters, torch::optim::AdamOptions(options.lr));
  base::Random random({5});
  // Runs several episodes, because Adam's first step depends only on the signs of the gradients.
  for (uint64_t episode = 1; episode <= 3; ++episode) {
    learner.begin_episode(static_cast<int64_t>(episode));
    std::vector<PolicyStep> steps;
    std::vector<double> returns;
    for (size_t t = 0; t < 5; ++t) {
      for (int observer = 0; observer < 2; ++observer) {
        ActionRequest request{observer, {}};
        for (uint32_t e = 0; e < 2; ++e) {
          const std::vector<double>& rewards = all_rewards[observer][e];
          if (t >= rewards.size()) continue;
          scenario::Observation x;
          for (float& number : x) number = static_cast<float>(2 * random.unit() - 1);
          request.states.push_back({e, x, t == 0 ? 0 : rewards[t - 1]});
          const auto rank = static_cast<uint64_t>(observer) + 1;
          steps.push_back({{x, base::Random({options.seed, rank, e, episode, t})}, 0, 0});
          returns.push_back(0);
          for (size_t later = t; later < rewards.size(); ++later) {
            returns.back() += std::pow(0.9, later - t) * rewards[later];
          }
        }
        if (request.states.empty()) continue;
        const Actions actions = learner.choose({request}).at(0);
        for (size_t i = 0; i < actions.size(); ++i) {
          steps[steps.size() - actions.size() + i].action = actions[i];
        }
      }
    }
    for (int observer = 0; observer < 2; ++observer) {
      const auto& rewards = all_rewards[observer];
      learner.report(observer, {{0, {}, rewards[0].back()}, {1, {}, rewards[1].back()}});
    }
    learner.end_episode();

    const at::Tensor raw = at::tensor(returns, at::kDouble);
    const at::Tensor normal = (raw - raw.mean()) / (raw.std() + 1.1920929e-07);
    for (size_t i = 0; i < steps.size(); ++i) {
      steps[i].advantage = normal[static_cast<int64_t>(i)].item<double>();
    }
    adam.zero_grad();
    torch_loss(parameters, steps).backward();
    adam.step();
  }
  const NamedTensors learned = learner.policy().named_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    CAPTURE(Policy::names()[i]);
    const at::Tensor difference = learned.at(Policy::names()[i]) - parameters[i];
    CHECK(difference.abs().max().item<double>() < 1e-5);
  }
}

TEST_CASE_METHOD(Learners, "an unknown environment is refused") {
  Listener nobody(events_of<RlOptions>());
  Learner learner(options, c10::kCPU, nobody);
  learner.begin_episode(1);
  for (const int observer : {-1, 2}) {
    CHECK_THROWS_AS(learner.check({observer, {{0, {}, 0}}}), base::Exception);
    CHECK_THROWS_AS(learner.choose({{observer, {{0, {}, 0}}}}), base::Exception);
  }
  CHECK_THROWS_AS(learner.check({0, {{0, {}, 0}, {2, {}, 0}}}), base::Exception);
  CHECK_THROWS_AS(learner.check({1, {{1, {}, 0}, {1, {}, 0}}}), base::Exception);
  learner.check({1, {{0, {}, 0}, {1, {}, 0}}});
  CHECK_THROWS_AS(learner.report(0, {{2, {}, 1}}), base::Exception);
  // The learner also refuses to learn from an incomplete episode.
  CHECK_THROWS_AS(learner.end_episode(), base::Exception);
}
