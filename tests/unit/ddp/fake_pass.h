#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "distrain/base/error.h"
#include "distrain/ddp/gradient_source.h"

namespace distrain::testing {

/// A distributed pass that computes its gradients with torch's own engine, without touching
/// `.grad`, and announces them in a given order.
class FakePass final : public ddp::GradientPass {
 public:
  at::Tensor gradient(const at::Tensor& variable) override { return slot(variable); }
  void set_gradient(const at::Tensor& variable, at::Tensor gradient) override {
    slot(variable) = std::move(gradient);
  }
  void on_gradient_ready(const at::Tensor& variable,
                         std::function<void(const at::Tensor&)> fn) override {
    if (ready_.size() == refuses_after) base::invalid("this pass takes no more variables");
    ready_.emplace_back(variable, std::move(fn));
  }
  void on_pass_end(std::function<void()> fn) override { end_ = std::move(fn); }

  size_t refuses_after = SIZE_MAX;  ///< a number of variables

  /// Runs the backward pass of `loss` and announces the gradients of the variables in `order`,
  /// which has indices in the order of registration.
  void backward(const at::Tensor& loss, const std::vector<size_t>& order) {
    std::vector<at::Tensor> variables;
    for (auto& [variable, fn] : ready_) variables.push_back(variable);
    const auto gradients =
        torch::autograd::grad({loss}, variables, {}, /*retain_graph=*/true, false, true);
    for (size_t i = 0; i < variables.size(); ++i) slot(variables[i]) = gradients[i];
    for (size_t i : order) {
      if (gradients[i].defined()) ready_[i].second(gradients[i]);
    }
    end_();
  }
  void backward(const at::Tensor& loss) {
    std::vector<size_t> order(ready_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    backward(loss, order);
  }
  /// Drops the registered functions without calling them, as a failed pass does.
  void drop() {
    ready_.clear();
    end_ = nullptr;
  }

 private:
  at::Tensor& slot(const at::Tensor& variable) {
    for (auto& [known, gradient] : gradients_) {
      if (known.is_same(variable)) return gradient;
    }
    return gradients_.emplace_back(variable, at::Tensor()).second;
  }

  std::vector<std::pair<at::Tensor, std::function<void(const at::Tensor&)>>> ready_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
  std::function<void()> end_;
};

}  // namespace distrain::testing
