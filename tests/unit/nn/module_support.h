#pragma once

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include <torch/autograd.h>

#include "distrain/autograd/context.h"
#include "distrain/nn/module.h"
#include "distrain/nn/remote_module.h"
#include "distrain/optim/distributed_optimizer.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing {

// Returns the gradient of a parameter. Must run on the parameter's owner, which holds the gradient.
inline at::Tensor gradient_of(rpc::CallContext& call, const rpc::RRef<at::Tensor>& parameter,
                              uint64_t context) {
  return autograd::gradient(call.agent, context, parameter.local_value());
}
inline int64_t address_of(const rpc::RRef<at::Tensor>& parameter) {
  return reinterpret_cast<int64_t>(parameter.local_value().data_ptr());
}

inline at::Tensor forward_of(const nn::RemoteModule<>& module, const at::Tensor& x) {
  return module.forward(x);
}

inline void setup_modules(rpc::Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
  nn::install(agent);
  agent.expose<&gradient_of>("gradient_of");
  agent.expose<&address_of>("address_of");
  agent.expose<&forward_of>("forward_of");
}

/// Returns a cluster whose rank 1 exposes `make` as "net".
template <class Make>
Cluster cluster_with(Make make) {
  return Cluster(2, [&make](rpc::Agent& agent) {
    setup_modules(agent);
    if (agent.rank() == 1) nn::expose_module(agent, "net", make);
  });
}

inline std::vector<at::Tensor> gradients_in(const autograd::Context& context,
                                            const std::vector<rpc::RRef<at::Tensor>>& parameters) {
  const rpc::ContextScope outside(0);
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    gradients.push_back(
        context.agent().rpc_sync<&gradient_of>(parameter.owner(), parameter, context.id()));
  }
  return gradients;
}

/// Sets the parameters of `module` to `values`.
template <class Holder>
void give_values(const Holder& module, const rpc::NamedTensors& values) {
  const at::NoGradGuard no_grad;
  for (auto& item : module->named_parameters()) item.value().copy_(values.at(item.key()));
}

/// Returns torch's gradients of `loss(module)` in one process, with `values` as the parameters.
template <class Holder, class Loss>
std::vector<at::Tensor> oracle_gradients(Holder module, const rpc::NamedTensors& values,
                                         const Loss& loss) {
  give_values(module, values);
  return torch::autograd::grad({loss(module)}, module->parameters());
}

inline void check_equal(const std::vector<at::Tensor>& found,
                        const std::vector<at::Tensor>& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    REQUIRE(found[i].defined());
    CHECK(at::equal(found[i], expected[i]));
  }
}

}  // namespace distrain::testing
