#include "nodes.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "distrain/base/error.h"

namespace distrain::autograd {

SendNode::SendNode(int to, uint64_t answered, const std::vector<at::Tensor>& tensors)
    : to_(to), answered_(answered) {
  for (const at::Tensor& tensor : tensors) {
    add_input_metadata(tensor);
    add_next_edge(torch::autograd::impl::gradient_edge(tensor));
  }
}

void RecvNode::attach(const std::shared_ptr<RecvNode>& self, std::vector<at::Tensor>& tensors) {
  torch::autograd::set_history(tensors, self);
}

torch::autograd::variable_list RecvNode::apply(torch::autograd::variable_list&&) {
  base::invalid("this graph goes on on rank " + std::to_string(from_) +
                ": use distrain::autograd::backward(context, {loss}) in place of "
                "loss.backward()");
}

}  // namespace distrain::autograd
