#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/named_tensors.h"

namespace distrain::models {

/// What the policy sees of a world.
using Observation = std::array<float, 4>;

/// What the random numbers of one step are drawn from: its dropout and its action. Nothing else
/// decides them, whatever is asked for before or together with them.
struct StepKey {
  uint64_t seed = 0;
  uint64_t observer = 0;
  uint64_t environment = 0;
  uint64_t episode = 0;
  uint64_t step = 0;
};

/// A state that an action is wanted for.
struct PolicyInput {
  Observation observation{};
  StepKey key;
};

/// A step that was made, and what it was good for.
struct PolicyStep {
  PolicyInput input;
  int action = 0;
  double advantage = 0;  ///< its normalised return
};

/// The tutorial's policy: Linear(4, 128), dropout 0.6, ReLU, Linear(128, 2), softmax.
///
/// On the CPU it computes in plain loops, row by row. A row's result must not depend on how many
/// others come with it, or on the number of threads, and LibTorch's matrix products promise
/// neither; and for a net of this size they take longer than the loops. Other devices use matrix
/// products, with the same random numbers. const functions are thread-safe.
class Policy {
 public:
  static constexpr int kHidden = 128;
  static constexpr int kActions = 2;
  static constexpr double kDropout = 0.6;

  /// Initialised as torch.nn.Linear is.
  explicit Policy(uint64_t seed, c10::Device device = c10::kCPU);

  static const std::vector<std::string>& names();
  /// In the order of names().
  std::vector<at::Tensor>& parameters() { return parameters_; }
  data::NamedTensors named_parameters() const;

  /// One forward pass over all of `inputs`, without a graph; an action is drawn for each.
  std::vector<int> act(std::span<const PolicyInput> inputs) const;

  /// The likelier action, without dropout: what a trained policy does.
  int best(const Observation& observation) const;

  struct Loss {
    double value = 0;
    std::vector<at::Tensor> gradients;  ///< in the order of names()
  };
  /// REINFORCE (Williams 1992): the sum over all steps of -log p(action) × advantage, each with the
  /// dropout that its action was drawn with, and its gradient. One pass over all of `steps`.
  Loss loss(std::span<const PolicyStep> steps) const;

  /// 0, or what keeps the mean: 1 / (1 - kDropout).
  static std::array<float, kHidden> dropout_mask(const StepKey& key);

 private:
  const c10::Device device_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace distrain::models
