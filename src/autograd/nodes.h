#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "distrain/base/error.h"

namespace distrain::autograd {

/// Represents tensors that this rank sent. Their gradients enter the graph here.
class SendNode final : public torch::autograd::Node {
 public:
  /// `answered` is the number of the call of rank `to` that `tensors` answer, or 0 if they are
  /// arguments of a call.
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

/// Represents tensors that came from another rank. Pass sends their gradients back to that rank.
/// Torch's own engine cannot do so, so apply() throws.
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
