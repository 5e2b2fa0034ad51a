#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "distrain/base/error.h"

namespace distrain::autograd {

/// Stands where tensors left this rank: the gradients that come back for them enter the graph here.
class SendNode final : public torch::autograd::Node {
 public:
  /// An input and an edge for each of `tensors`. `answered`: the call of rank `to` that they
  /// answer; 0: they are a call's arguments.
  SendNode(int to, uint64_t answered, const std::vector<at::Tensor>& tensors)
      : to_(to), answered_(answered) {
    for (const at::Tensor& tensor : tensors) {
      add_input_metadata(tensor);
      add_next_edge(torch::autograd::impl::gradient_edge(tensor));
    }
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return std::move(grads);
  }
  std::string name() const override { return "distrain::SendBackward"; }
  int to() const { return to_; }
  uint64_t answered() const { return answered_; }

 private:
  const int to_;
  const uint64_t answered_;
};

/// Stands where tensors came from another rank: their gradients leave the graph here. The engine
/// sends them; torch's own engine cannot, which is what apply() says.
class RecvNode final : public torch::autograd::Node {
 public:
  RecvNode(uint64_t context, uint64_t autograd_id, int from)
      : context_(context), autograd_id_(autograd_id), from_(from) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    base::invalid("this graph goes on on rank " + std::to_string(from_) +
                  ": use distrain::autograd::backward(context, {loss}) in place of "
                  "loss.backward()");
  }
  std::string name() const override { return "distrain::RecvBackward"; }

  uint64_t context() const { return context_; }
  uint64_t autograd_id() const { return autograd_id_; }
  int from() const { return from_; }

 private:
  const uint64_t context_;
  const uint64_t autograd_id_;
  const int from_;
};

}  // namespace distrain::autograd
