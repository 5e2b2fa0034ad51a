// Layers with one weight. A layer stays on its rank, and a DistributedOptimizer trains its weight.
#pragma once

#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"

namespace distrain::testing {

/// Computes x · w, a matrix product.
struct Layer {
  using Constructor = Layer(at::Tensor weight);
  explicit Layer(at::Tensor w) : weight(w.clone().requires_grad_()) {}
  at::Tensor forward(at::Tensor x) { return x.matmul(weight); }
  rpc::RRef<at::Tensor> parameter(rpc::CallContext& context) {
    return context.agent.make_rref(weight);
  }
  at::Tensor value() { return weight.detach().clone(); }
  at::Tensor weight;
};

inline void expose_layers(rpc::Agent& agent) {
  agent.expose_class<Layer>("Layer");
  agent.expose<&Layer::forward>("Layer.forward");
  agent.expose<&Layer::parameter>("Layer.parameter");
  agent.expose<&Layer::value>("Layer.value");
}

/// Runs a backward pass in which each element of the weight of `layer` gets the gradient `scale`.
/// The weight must have the shape [2, 1].
inline void backward_of(autograd::Context& context, const rpc::RRef<Layer>& layer, double scale) {
  const at::Tensor x = at::full({1, 2}, scale, at::kDouble);
  autograd::backward(context, {layer.rpc_sync<&Layer::forward>(x).sum()});
}

/// Computes x * w, element by element.
struct Weight {
  using Constructor = Weight(at::Tensor value);
  explicit Weight(at::Tensor w) : weight(w.clone().requires_grad_()) {}
  at::Tensor forward(at::Tensor x) { return x * weight; }
  /// Returns rows of the weight; their gradient is sparse.
  at::Tensor rows(at::Tensor numbers) {
    return at::embedding(weight, numbers, -1, false, /*sparse=*/true);
  }
  rpc::RRef<at::Tensor> parameter(rpc::CallContext& context) {
    return context.agent.make_rref(weight);
  }
  at::Tensor value() { return weight.detach().clone(); }
  void freeze() { weight.requires_grad_(false); }
  at::Tensor weight;
};

inline void set_up_weights(rpc::Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
  agent.expose_class<Weight>("Weight");
  agent.expose<&Weight::forward>("Weight.forward");
  agent.expose<&Weight::rows>("Weight.rows");
  agent.expose<&Weight::parameter>("Weight.parameter");
  agent.expose<&Weight::value>("Weight.value");
  agent.expose<&Weight::freeze>("Weight.freeze");
}

}  // namespace distrain::testing
