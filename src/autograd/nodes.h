#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "distrain/base/error.h"

namespace distrain::autograd {

/// Represents tensors that this rank sent. Their gradients enter the graph here.
struct SendNode final : torch::autograd::Node {
  SendNode(int to_in, uint64_t answered_in, const std::vector<at::Tensor>& tensors)
      : to(to_in), answered(answered_in) {
    for (const at::Tensor& tensor : tensors) {
      add_input_metadata(tensor);
      add_next_edge(torch::autograd::impl::gradient_edge(tensor));
    }
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return std::move(grads);
  }
  std::string name() const override { return "distrain::SendBackward"; }

  const int to;             // the rank that received the tensors
  const uint64_t answered;  // the number of its call that the tensors answer; 0: they are arguments
};

/// Represents tensors that came from another rank. Pass sends their gradients back to that rank.
/// Torch's own engine cannot do so, so apply() throws.
struct RecvNode final : torch::autograd::Node {
  RecvNode(uint64_t context_in, uint64_t autograd_id_in, int from_in)
      : context(context_in), autograd_id(autograd_id_in), from(from_in) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    base::invalid("this graph goes on on rank " + std::to_string(from) +
                  ": use distrain::autograd::backward(context, {loss}) in place of "
                  "loss.backward()");
  }
  std::string name() const override { return "distrain::RecvBackward"; }

  const uint64_t context;
  const uint64_t autograd_id;
  const int from;
};

}  // namespace distrain::autograd
