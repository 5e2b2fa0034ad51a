#include "policy.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <torch/csrc/autograd/autograd.h>

#include "distrain/rpc/device.h"

namespace distrain::scenario {

namespace {

constexpr int kInputs = std::tuple_size_v<Observation>;

using Row = Policy::Row;

/// Returns the probability of action 1. `preference`: the score of action 1 minus that of action 0.
double probability(double preference) { return 1 / (1 + std::exp(-preference)); }

/// Returns log(probability(preference)) accurately even if the probability is almost 0.
double log_probability(double preference) {
  return preference > 0 ? -std::log1p(std::exp(-preference))
                        : preference - std::log1p(std::exp(preference));
}

/// Computes the dot product in eight independent sums, so that additions can run in parallel.
float dot(const float* a, const Row& b) {
  constexpr size_t kParts = 8;
  std::array<float, kParts> sums{};
  for (size_t j = 0; j < b.size(); j += kParts) {
    for (size_t k = 0; k < kParts; ++k) sums[k] += a[j + k] * b[j + k];
  }
  return std::accumulate(sums.begin(), sums.end(), 0.0F);
}

/// Activations of one forward pass, for the gradients.
struct Activations {
  alignas(64) Row mask;
  alignas(64) Row hidden;  ///< after dropout and ReLU
  double preference = 0;   ///< score of action 1 minus score of action 0
};

/// Runs the forward pass of one input on the CPU, with dropout drawn from `random`.
Activations forward(const std::vector<at::Tensor>& parameters, const PolicyInput& input,
                    base::Random& random) {
  const auto* const weight1 = parameters[0].const_data_ptr<float>();
  const auto* const bias1 = parameters[1].const_data_ptr<float>();
  const auto* const weight2 = parameters[2].const_data_ptr<float>();
  const auto* const bias2 = parameters[3].const_data_ptr<float>();
  Activations at;
  at.mask = Policy::dropout_mask(random);
  const Observation& x = input.observation;
  for (size_t j = 0; j < Policy::kHidden; ++j) {
    const float* const w = weight1 + kInputs * j;
    const float sum = bias1[j] + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3];
    at.hidden[j] = std::max(sum * at.mask[j], 0.0F);
  }
  const double score0 = dot(weight2, at.hidden) + bias2[0];
  at.preference = dot(weight2 + Policy::kHidden, at.hidden) + bias2[1] - score0;
  return at;
}

/// Computes each input's preference for action 1, double [n], on the parameters' device.
/// Appends to `draws` the random number with which each input's action is chosen.
at::Tensor forward_on_device(const std::vector<at::Tensor>& parameters,
                             const std::vector<PolicyInput>& inputs, std::vector<double>& draws) {
  const c10::Device device = parameters[0].device();
  const auto rows = static_cast<int64_t>(inputs.size());
  const at::Tensor states = at::empty({rows, kInputs});
  const at::Tensor masks = at::empty({rows, Policy::kHidden});
  auto* to = states.mutable_data_ptr<float>();
  auto* mask_to = masks.mutable_data_ptr<float>();
  for (const PolicyInput& input : inputs) {
    base::Random random = input.random;
    mask_to = std::ranges::copy(Policy::dropout_mask(random), mask_to).out;
    to = std::ranges::copy(input.observation, to).out;
    draws.push_back(random.unit());
  }
  const at::Tensor sums = at::linear(rpc::to_device(states, device), parameters[0], parameters[1]);
  const at::Tensor hidden = (sums * rpc::to_device(masks, device)).relu();
  const at::Tensor scores = at::linear(hidden, parameters[2], parameters[3]).to(at::kDouble);
  return scores.select(1, 1) - scores.select(1, 0);
}

Policy::Loss loss_on_device(const std::vector<at::Tensor>& values,
                            std::span<const PolicyStep> steps) {
  const at::AutoGradMode recording(true);
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& each : values) parameters.push_back(each.detach().requires_grad_());
  std::vector<PolicyInput> inputs;
  std::vector<double> signs, advantages, draws;
  for (const PolicyStep& step : steps) {
    inputs.push_back(step.input);
    signs.push_back(step.action == 1 ? 1 : -1);
    advantages.push_back(step.advantage);
  }
  const auto here = [&](const std::vector<double>& numbers) {
    return rpc::to_device(at::tensor(numbers), values[0].device());
  };
  const at::Tensor taken = forward_on_device(parameters, inputs, draws) * here(signs);
  const at::Tensor loss = -(at::log_sigmoid(taken) * here(advantages)).sum();
  return {loss.item<double>(), torch::autograd::grad({loss}, parameters)};
}

}  // namespace

Policy::Policy(uint64_t seed, c10::Device device) : device_(device) {
  // Initialize as torch.nn.Linear, without uniform_(), whose rounding depends on the processor.
  base::Random random({seed});
  const auto layer = [&](int64_t inputs, int64_t outputs) {
    const double bound = 1 / std::sqrt(static_cast<double>(inputs));
    for (const at::Tensor& parameter : {at::empty({outputs, inputs}), at::empty({outputs})}) {
      float* const numbers = parameter.mutable_data_ptr<float>();
      std::generate_n(numbers, parameter.numel(),
                      [&] { return static_cast<float>((2 * random.unit() - 1) * bound); });
      parameters_.push_back(rpc::to_device(parameter, device));
    }
  };
  layer(kInputs, kHidden);
  layer(kHidden, kActions);
}

Row Policy::dropout_mask(base::Random& random) {
  constexpr auto kBound = static_cast<uint32_t>((1 - kDropout) * 0x1p32);
  constexpr float kKept = 1 / (1 - kDropout);
  Row mask;
  for (size_t j = 0; j < mask.size(); j += 2) {
    const uint64_t bits = random.next();
    mask[j] = static_cast<uint32_t>(bits) < kBound ? kKept : 0.0F;
    mask[j + 1] = static_cast<uint32_t>(bits >> 32) < kBound ? kKept : 0.0F;
  }
  return mask;
}

std::vector<int> Policy::act(std::span<const PolicyInput> inputs) const {
  std::vector<int> actions;
  actions.reserve(inputs.size());
  const auto choose = [&](double preference, double draw) {
    actions.push_back(draw < probability(preference) ? 1 : 0);
  };
  if (rpc::is_accelerator(device_)) {
    const at::NoGradGuard no_grad;
    std::vector<double> draws;
    const at::Tensor given = forward_on_device(parameters_, {inputs.begin(), inputs.end()}, draws);
    const at::Tensor preferences = rpc::to_device(given, c10::kCPU).contiguous();
    const auto* preference = preferences.const_data_ptr<double>();
    for (const double draw : draws) choose(*preference++, draw);
  } else {
    for (const PolicyInput& input : inputs) {
      base::Random random = input.random;
      const double preference = forward(parameters_, input, random).preference;
      choose(preference, random.unit());
    }
  }
  return actions;
}

Policy::Loss Policy::loss(std::span<const PolicyStep> steps) const {
  if (rpc::is_accelerator(device_)) return loss_on_device(parameters_, steps);
  const auto* const out = parameters_[2].const_data_ptr<float>();  // [kActions, kHidden]
  alignas(64) std::array<Row, kInputs> weight1{};
  alignas(64) Row bias1{};
  alignas(64) Row weight2{};  // gradient for action 1; that for action 0 is its negative
  double bias2 = 0;
  Loss loss;
  for (const PolicyStep& step : steps) {
    base::Random random = step.input.random;
    const Activations at = forward(parameters_, step.input, random);
    const double taken = step.action == 1 ? at.preference : -at.preference;
    loss.value -= log_probability(taken) * step.advantage;
    // The derivative of the loss with respect to the preference.
    const double slope = (probability(at.preference) - step.action) * step.advantage;
    const auto by_score = static_cast<float>(slope);
    const Observation& x = step.input.observation;
    bias2 += slope;
    for (size_t j = 0; j < kHidden; ++j) {
      weight2[j] += by_score * at.hidden[j];
      // If `hidden` is above 0, neither dropout nor the ReLU has zeroed it.
      const float by_sum =
          at.hidden[j] > 0 ? by_score * (out[kHidden + j] - out[j]) * at.mask[j] : 0.0F;
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

}  // namespace distrain::scenario
