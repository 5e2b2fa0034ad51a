#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/optim/single_process_optimizer.h"
#include "distrain/rpc/to_device.h"
#include "environment.h"

namespace distrain::scenario {

struct PolicyInput {
  Observation observation{};
  base::Random random{0};  ///< draws the dropout and the action for this input only
};

struct PolicyStep {
  PolicyInput input;
  int action = 0;
  double advantage = 0;  ///< the step's normalized return
};

/// The policy of PyTorch's tutorial: Linear(4, 128), dropout 0.6, ReLU, Linear(128, 2), softmax.
///
/// On the CPU it computes row by row in plain loops, because a row's result must not depend on the
/// number of rows or threads, which LibTorch's matrix products do not guarantee. For a net of this
/// size the loops are also faster. Other devices use matrix products, with the same random numbers.
/// const functions are thread-safe.
class Policy {
 public:
  static constexpr int kHidden = 128;
  static constexpr int kActions = 2;
  static constexpr double kDropout = 0.6;

  /// Initializes as torch.nn.Linear does.
  explicit Policy(uint64_t seed, c10::Device device = c10::kCPU);

  static const std::vector<std::string>& names() {
    static const std::vector<std::string> kNames = {"affine1.weight", "affine1.bias",
                                                    "affine2.weight", "affine2.bias"};
    return kNames;
  }
  std::vector<at::Tensor>& parameters() { return parameters_; }  ///< in the order of names()
  rpc::NamedTensors named_parameters() const {
    const auto named = optim::named(names(), parameters_);
    return {named.begin(), named.end()};
  }

  /// Draws an action for each of `inputs`, without recording a graph.
  std::vector<int> act(std::span<const PolicyInput> inputs) const;

  /// Returns the more probable action, without dropout, for evaluation.
  int best(const Observation& observation) const {
    const at::NoGradGuard no_grad;
    const at::Tensor input = rpc::to_device(at::tensor(c10::ArrayRef<float>(observation)), device_);
    const at::Tensor hidden = at::linear(input, parameters_[0], parameters_[1]).relu_();
    return at::linear(hidden, parameters_[2], parameters_[3]).argmax().item<int>();
  }

  struct Loss {
    double value = 0;
    std::vector<at::Tensor> gradients;  ///< in the order of names()
  };
  /// Returns the REINFORCE loss (Williams 1992) and its gradients: the sum over `steps` of
  /// -log p(action) × advantage. Each step uses the dropout with which its action was drawn.
  Loss loss(std::span<const PolicyStep> steps) const;

  using Row = std::array<float, kHidden>;
  /// Draws a dropout factor, 0 or 1 / (1 - kDropout), for each hidden unit.
  static Row dropout_mask(base::Random& random);

 private:
  const c10::Device device_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace distrain::scenario
