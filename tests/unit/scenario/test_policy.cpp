#include <cmath>

#include <ATen/Functions.h>

#include "distrain/base/random.h"
#include "scenario/rl/policy.h"
#include "support/catch.h"
#include "support/torch_policy.h"

using namespace distrain;
using scenario::Policy;
using scenario::PolicyInput;
using scenario::PolicyStep;

namespace {

std::vector<PolicyInput> some_inputs(size_t count) {
  base::Random random({7});
  std::vector<PolicyInput> inputs(count);
  for (size_t i = 0; i < count; ++i) {
    for (float& x : inputs[i].observation) x = static_cast<float>(4 * random.unit() - 2);
    inputs[i].random = base::Random({1, 2, 3, 4, i});
  }
  return inputs;
}

std::vector<PolicyStep> some_steps(size_t count) {
  base::Random random({8});
  std::vector<PolicyStep> steps;
  for (const PolicyInput& input : some_inputs(count)) {
    steps.push_back({input, static_cast<int>(random.below(2)), 4 * random.unit() - 2});
  }
  return steps;
}

}  // namespace

TEST_CASE("the policy's gradient equals autograd's") {
  Policy policy(GENERATE(1, 2));
  const std::vector<PolicyStep> steps = some_steps(50);
  const std::vector<at::Tensor> parameters = testing::torch_parameters(policy);
  const at::Tensor expected = testing::torch_loss(parameters, steps);
  expected.backward();
  const Policy::Loss loss = policy.loss(steps);
  CHECK(loss.value == Approx(expected.item<double>()).epsilon(1e-5));
  REQUIRE(loss.gradients.size() == parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    CAPTURE(Policy::names()[i]);
    const at::Tensor gradient = parameters[i].grad();
    REQUIRE(loss.gradients[i].sizes() == gradient.sizes());
    CHECK((loss.gradients[i] - gradient).norm().item<double>() <=
          1e-5 * gradient.norm().item<double>());
  }
}

TEST_CASE("the policy's gradient equals the numerical one") {
  Policy policy(3);
  const std::vector<PolicyStep> steps = some_steps(20);
  const Policy::Loss loss = policy.loss(steps);
  for (size_t i = 0; i < loss.gradients.size(); ++i) {
    CAPTURE(Policy::names()[i]);
    // Differentiates along the gradient, where the loss changes most and rounding matters least.
    const at::Tensor direction = loss.gradients[i] / loss.gradients[i].norm();
    at::Tensor& parameter = policy.parameters()[i];
    const at::Tensor before = parameter.clone();
    const auto value_at = [&](double way) {
      parameter.copy_(before + way * direction);
      return policy.loss(steps).value;
    };
    constexpr double kWay = 1e-3;
    const double change = (value_at(kWay) - value_at(-kWay)) / (2 * kWay);
    CHECK(change == Approx(loss.gradients[i].norm().item<double>()).epsilon(0.01));
    value_at(0);
  }
}

TEST_CASE("an action depends only on its own state and key") {
  const Policy policy(1);
  const std::vector<PolicyInput> inputs = some_inputs(300);
  const std::vector<int> together = policy.act(inputs);
  REQUIRE(together.size() == inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) CHECK(policy.act({&inputs[i], 1})[0] == together[i]);
  CHECK(policy.act({}).empty());
}

TEST_CASE("actions are drawn with the policy's probabilities") {
  Policy policy(1);
  // Zeroes all but the last bias, so that neither the input nor dropout changes the probabilities.
  for (size_t i = 0; i < 3; ++i) policy.parameters()[i].zero_();
  policy.parameters()[3].copy_(at::tensor({0.0F, std::log(3.0F)}));
  std::vector<PolicyInput> inputs = some_inputs(4000);
  int64_t ones = 0;
  for (const int action : policy.act(inputs)) ones += action;
  CHECK(ones > 3000 - 4 * 28);  // four standard deviations
  CHECK(ones < 3000 + 4 * 28);
}

TEST_CASE("a policy's scores may be arbitrarily large") {
  Policy policy(1);
  for (size_t i = 0; i < 3; ++i) policy.parameters()[i].zero_();
  policy.parameters()[3].copy_(at::tensor({0.0F, 1e30F}));
  const PolicyInput input = some_inputs(1)[0];
  CHECK(policy.act({&input, 1})[0] == 1);
  for (const int action : {0, 1}) {
    const PolicyStep step{input, action, 1};
    const Policy::Loss loss = policy.loss({&step, 1});
    CHECK(loss.value == Approx(action == 1 ? 0 : 1e30));
    for (const at::Tensor& gradient : loss.gradients) CHECK(gradient.isfinite().all().item<bool>());
  }
}

TEST_CASE("dropout keeps two fifths of the units, and the mean") {
  const auto mask_of = [](std::initializer_list<uint64_t> key) {
    base::Random random(key);
    return Policy::dropout_mask(random);
  };
  int64_t kept = 0;
  std::array<int64_t, Policy::kHidden> by_unit{};
  for (uint64_t step = 0; step < 1000; ++step) {
    const auto mask = mask_of({1, 1, 0, 1, step});
    CHECK(mask == mask_of({1, 1, 0, 1, step}));
    for (size_t j = 0; j < mask.size(); ++j) {
      CHECK((mask[j] == 0 || mask[j] == 2.5F));
      kept += mask[j] > 0;
      by_unit[j] += mask[j] > 0;
    }
  }
  CHECK(std::abs(static_cast<double>(kept) - 51200) < 4 * 175);
  for (const int64_t count : by_unit) CHECK(std::abs(static_cast<double>(count) - 400) < 5 * 15.5);
  CHECK(mask_of({1, 1, 0, 1, 0}) != mask_of({1, 2, 0, 1, 0}));
}

TEST_CASE("a policy is initialized as torch.nn.Linear is") {
  Policy policy(1), same(1), other(2);
  const std::vector<double> bounds = {0.5, 0.5, 1 / std::sqrt(128.0), 1 / std::sqrt(128.0)};
  for (size_t i = 0; i < bounds.size(); ++i) {
    CAPTURE(Policy::names()[i]);
    const at::Tensor& parameter = policy.parameters()[i];
    CHECK(parameter.abs().max().item<double>() <= bounds[i]);
    if (parameter.numel() > 100) CHECK(parameter.abs().max().item<double>() > 0.95 * bounds[i]);
    CHECK(at::equal(parameter, same.parameters()[i]));
    CHECK_FALSE(at::equal(parameter, other.parameters()[i]));
  }
  CHECK(policy.named_parameters().at("affine1.weight").sizes() == at::IntArrayRef({128, 4}));
  CHECK(policy.named_parameters().at("affine2.weight").sizes() == at::IntArrayRef({2, 128}));
}
