// The policy of distrain rl, computed by LibTorch for comparison.
#pragma once

#include <vector>

#include <ATen/Functions.h>

#include "scenario/rl/policy.h"

namespace distrain::testing {

/// Returns the parameters in double precision, with gradients required.
inline std::vector<at::Tensor> torch_parameters(scenario::Policy policy) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& p : policy.parameters()) {
    parameters.push_back(p.to(at::kDouble).requires_grad_());
  }
  return parameters;
}

/// Returns the sum of -log p(action) × advantage over `steps`.
inline at::Tensor torch_loss(const std::vector<at::Tensor>& parameters,
                             const std::vector<scenario::PolicyStep>& steps) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const scenario::PolicyStep& step : steps) {
    auto x = step.input.observation;
    base::Random random = step.input.random;
    auto mask = scenario::Policy::dropout_mask(random);
    at::Tensor hidden = at::linear(at::from_blob(x.data(), {4}, at::kFloat).to(at::kDouble),
                                   parameters[0], parameters[1]);
    hidden = at::relu(hidden *
                      at::from_blob(mask.data(), {scenario::Policy::kHidden}, at::kFloat).clone());
    const at::Tensor scores = at::linear(hidden, parameters[2], parameters[3]);
    loss = loss - at::log_softmax(scores, 0)[step.action] * step.advantage;
  }
  return loss;
}

}  // namespace distrain::testing
