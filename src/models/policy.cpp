#include "distrain/models/policy.h"

#include <algorithm>
#include <cmath>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/rpc/device.h"
#include "distrain/rpc/placed.h"

namespace distrain::models {

namespace {

constexpr int kInputs = std::tuple_size_v<Observation>;

base::Random random_of(const StepKey& key) {
  return base::Random({key.seed, key.observer, key.environment, key.episode, key.step});
}

/// Two hidden units for each number, 32 bits for each unit.
std::array<float, Policy::kHidden> draw_mask(base::Random& random) {
  constexpr auto kBound = static_cast<uint32_t>((1 - Policy::kDropout) * 0x1p32);
  constexpr float kKept = 1 / (1 - Policy::kDropout);
  std::array<float, Policy::kHidden> mask;
  for (size_t j = 0; j < mask.size(); j += 2) {
    const uint64_t bits = random.next();
    mask[j] = static_cast<uint32_t>(bits) < kBound ? kKept : 0.0F;
    mask[j + 1] = static_cast<uint32_t>(bits >> 32) < kBound ? kKept : 0.0F;
  }
  return mask;
}

/// Of action 1, when its score is so much above that of action 0.
double probability(double preference) { return 1 / (1 + std::exp(-preference)); }

/// log of probability(), also where that is next to 0.
double log_probability(double preference) {
  return preference > 0 ? -std::log1p(std::exp(-preference))
                        : preference - std::log1p(std::exp(preference));
}

/// In eight parts, so that the additions need not wait for each other.
float dot(const std::array<float, Policy::kHidden>& a,
          const std::array<float, Policy::kHidden>& b) {
  constexpr size_t kParts = 8;
  std::array<float, kParts> sums{};
  for (size_t j = 0; j < a.size(); j += kParts) {
    for (size_t k = 0; k < kParts; ++k) sums[k] += a[j + k] * b[j + k];
  }
  float sum = 0;
  for (const float part : sums) sum += part;
  return sum;
}

}  // namespace

Policy::Policy(uint64_t seed, c10::Device device) : device_(device) {
  // As torch's Linear begins, but not by uniform_(): that rounds otherwise on other processors, and
  // the episodes are then others.
  base::Random random({seed});
  const auto layer = [&](int64_t inputs, int64_t outputs) {
    const double bound = 1 / std::sqrt(static_cast<double>(inputs));
    for (const at::Tensor& parameter : {at::empty({outputs, inputs}), at::empty({outputs})}) {
      float* const numbers = parameter.mutable_data_ptr<float>();
      std::generate_n(numbers, parameter.numel(),
                      [&] { return static_cast<float>((2 * random.unit() - 1) * bound); });
      parameters_.push_back(rpc::placed(parameter, device));
    }
  };
  layer(kInputs, kHidden);
  layer(kHidden, kActions);
  refresh();
}

const std::vector<std::string>& Policy::names() {
  static const std::vector<std::string> kNames = {"affine1.weight", "affine1.bias",
                                                  "affine2.weight", "affine2.bias"};
  return kNames;
}

data::NamedTensors Policy::named_parameters() const {
  data::NamedTensors named;
  for (size_t i = 0; i < parameters_.size(); ++i) named[names()[i]] = parameters_[i];
  return named;
}

void Policy::refresh() {
  if (rpc::is_accelerator(device_)) return;
  at::from_blob(weight1_.data(), {kInputs, kHidden}).copy_(parameters_[0].t());
  at::from_blob(bias1_.data(), {kHidden}).copy_(parameters_[1]);
  at::from_blob(weight2_.data(), {kActions, kHidden}).copy_(parameters_[2]);
  at::from_blob(bias2_.data(), {kActions}).copy_(parameters_[3]);
}

std::array<float, Policy::kHidden> Policy::dropout_mask(const StepKey& key) {
  base::Random random = random_of(key);
  return draw_mask(random);
}

Policy::Activations Policy::forward(const PolicyInput& input, base::Random& random) const {
  Activations at;
  at.mask = draw_mask(random);
  const Observation& x = input.observation;
  for (size_t j = 0; j < kHidden; ++j) {
    const float sum = bias1_[j] + weight1_[0][j] * x[0] + weight1_[1][j] * x[1] +
                      weight1_[2][j] * x[2] + weight1_[3][j] * x[3];
    at.hidden[j] = std::max(sum * at.mask[j], 0.0F);
  }
  const double score0 = dot(weight2_[0], at.hidden) + bias2_[0];
  at.preference = dot(weight2_[1], at.hidden) + bias2_[1] - score0;
  return at;
}

std::vector<int> Policy::act(std::span<const PolicyInput> inputs) const {
  if (rpc::is_accelerator(device_)) return act_on_device(inputs);
  std::vector<int> actions;
  actions.reserve(inputs.size());
  for (const PolicyInput& input : inputs) {
    base::Random random = random_of(input.key);
    const Activations at = forward(input, random);
    actions.push_back(random.unit() < probability(at.preference) ? 1 : 0);
  }
  return actions;
}

int Policy::best(const Observation& observation) const {
  const at::NoGradGuard no_grad;
  const at::Tensor input = rpc::placed(at::tensor(c10::ArrayRef<float>(observation)), device_);
  const at::Tensor hidden = at::linear(input, parameters_[0], parameters_[1]).relu_();
  return at::linear(hidden, parameters_[2], parameters_[3]).argmax().item<int>();
}

Policy::Loss Policy::loss(std::span<const PolicyStep> steps) const {
  if (rpc::is_accelerator(device_)) return loss_on_device(steps);
  alignas(64) std::array<Row, kInputs> weight1{};
  alignas(64) Row bias1{};
  alignas(64) Row weight2{};  // of action 1; that of action 0 is its negative
  double bias2 = 0;
  Loss loss;
  for (const PolicyStep& step : steps) {
    base::Random random = random_of(step.input.key);
    const Activations at = forward(step.input, random);
    const double taken = step.action == 1 ? at.preference : -at.preference;
    loss.value -= log_probability(taken) * step.advantage;
    // By the softmax: p(1) - [action is 1], times the advantage.
    const double slope = (probability(at.preference) - step.action) * step.advantage;
    const auto by_score = static_cast<float>(slope);
    const Observation& x = step.input.observation;
    bias2 += slope;
    for (size_t j = 0; j < kHidden; ++j) {
      weight2[j] += by_score * at.hidden[j];
      // Above 0 it was neither dropped nor cut off by the ReLU.
      const float by_sum =
          at.hidden[j] > 0 ? by_score * (weight2_[1][j] - weight2_[0][j]) * at.mask[j] : 0.0F;
      bias1[j] += by_sum;
      for (size_t i = 0; i < kInputs; ++i) weight1[i][j] += by_sum * x[i];
    }
  }

  const at::Tensor of_action_1 = at::from_blob(weight2.data(), {1, kHidden});
  const at::Tensor rise = at::tensor({static_cast<float>(bias2)});
  loss.gradients = {at::from_blob(weight1.data(), {kInputs, kHidden}).t().contiguous(),
                    at::from_blob(bias1.data(), {kHidden}).clone(),
                    at::cat({-of_action_1, of_action_1}), at::cat({-rise, rise})};
  return loss;
}

Policy::Rows Policy::forward_rows(size_t count,
                                  const std::function<const PolicyInput&(size_t)>& input,
                                  const std::function<void(base::Random&)>& drawn) const {
  const auto rows = static_cast<int64_t>(count);
  const at::Tensor inputs = at::empty({rows, kInputs});
  const at::Tensor masks = at::empty({rows, kHidden});
  auto* to = inputs.mutable_data_ptr<float>();
  auto* mask_to = masks.mutable_data_ptr<float>();
  for (size_t i = 0; i < count; ++i) {
    base::Random random = random_of(input(i).key);
    mask_to = std::ranges::copy(draw_mask(random), mask_to).out;
    to = std::ranges::copy(input(i).observation, to).out;
    drawn(random);
  }
  Rows at{rpc::placed(inputs, device_), rpc::placed(masks, device_), {}, {}};
  at.hidden = (at::linear(at.inputs, parameters_[0], parameters_[1]) * at.mask).relu_();
  const at::Tensor scores = at::linear(at.hidden, parameters_[2], parameters_[3]).to(at::kDouble);
  at.preference = scores.select(1, 1) - scores.select(1, 0);
  return at;
}

std::vector<int> Policy::act_on_device(std::span<const PolicyInput> inputs) const {
  const at::NoGradGuard no_grad;
  std::vector<double> draws;
  const Rows at = forward_rows(
      inputs.size(), [&](size_t i) -> const PolicyInput& { return inputs[i]; },
      [&](base::Random& random) { draws.push_back(random.unit()); });
  const at::Tensor preferences = rpc::placed(at.preference, c10::kCPU).contiguous();
  const double* const preference = preferences.const_data_ptr<double>();
  std::vector<int> actions;
  for (size_t i = 0; i < draws.size(); ++i) {
    actions.push_back(draws[i] < probability(preference[i]) ? 1 : 0);
  }
  return actions;
}

Policy::Loss Policy::loss_on_device(std::span<const PolicyStep> steps) const {
  const at::NoGradGuard no_grad;
  const Rows at = forward_rows(
      steps.size(), [&](size_t i) -> const PolicyInput& { return steps[i].input; },
      [](base::Random&) {});
  const auto count = static_cast<int64_t>(steps.size());
  const at::Tensor told = at::empty({2, count}, at::kDouble);
  auto* const actions = told.mutable_data_ptr<double>();
  for (size_t i = 0; i < steps.size(); ++i) {
    actions[i] = steps[i].action;
    actions[steps.size() + i] = steps[i].advantage;
  }
  const at::Tensor here = rpc::placed(told, device_);
  const at::Tensor action = here[0], advantage = here[1];
  const at::Tensor taken = at.preference * (action * 2 - 1);
  Loss loss;
  loss.value = -(at::log_sigmoid(taken) * advantage).sum().item<double>();
  // As in loss(): by the softmax, then back through both layers.
  const at::Tensor slope = (at::sigmoid(at.preference) - action) * advantage;
  const at::Tensor by_score = slope.to(at::kFloat).unsqueeze(1);  // [n, 1]
  const at::Tensor weight2 = at::mm(by_score.t(), at.hidden);     // of action 1
  const at::Tensor bias2 = slope.sum().to(at::kFloat).view({1});
  const at::Tensor towards_1 = (parameters_[2][1] - parameters_[2][0]).unsqueeze(0);
  const at::Tensor by_sum = by_score * towards_1 * at.mask * at.hidden.gt(0);
  loss.gradients = {at::mm(by_sum.t(), at.inputs), by_sum.sum(0), at::cat({-weight2, weight2}),
                    at::cat({-bias2, bias2})};
  return loss;
}

}  // namespace distrain::models
