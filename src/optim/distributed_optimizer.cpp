#include "distrain/optim/distributed_optimizer.h"

#include <map>

#include "local_optimizer.h"

namespace distrain::optim {

namespace {

// What the ranks call on each other.

rpc::RRef<LocalOptimizer> attach(rpc::CallContext& context,
                                 const std::vector<rpc::RRef<at::Tensor>>& parameters,
                                 const OptimizerFields& options, int participants) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) values.push_back(parameter.local_value());
  return context.agent.make_rref(
      context.agent.local<LocalOptimizers>().find_or_make(values, options, participants));
}

std::vector<at::Tensor> gradients_of(rpc::Agent& agent, const LocalOptimizer& optimizer,
                                     const std::vector<uint64_t>& contexts) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : optimizer.parameters()) {
    at::Tensor sum;
    for (const uint64_t context : contexts) {
      const at::Tensor gradient = autograd::gradient(agent, context, parameter);
      if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient;
    }
    gradients.push_back(std::move(sum));
  }
  return gradients;
}

base::Future<void> step_here(rpc::CallContext& context, const rpc::RRef<LocalOptimizer>& optimizer,
                             const std::vector<uint64_t>& contexts, int participant) {
  const at::NoGradGuard no_grad;
  LocalOptimizer& here = optimizer.local_value();
  return here.step(participant, gradients_of(context.agent, here, contexts));
}

}  // namespace

UpdateCount install(rpc::Agent& agent) {
  const auto optimizers = std::make_shared<LocalOptimizers>();
  agent.provide(optimizers);
  agent.expose<&attach>("distrain.optim.attach");
  agent.expose<&step_here>("distrain.optim.step");
  return optimizers->updates();
}

DistributedOptimizer::DistributedOptimizer(rpc::Agent& agent,
                                           const std::vector<rpc::RRef<at::Tensor>>& parameters,
                                           const OptimizerOptions& options, Sharing sharing)
    : agent_(agent), sharing_(sharing) {
  std::map<int, std::vector<rpc::RRef<at::Tensor>>> by_owner;
  for (const auto& parameter : parameters) by_owner[parameter.owner()].push_back(parameter);
  const OptimizerFields fields = to_fields(options);
  const int participants = sharing.mode == Sharing::Mode::kSync ? sharing.participants : 1;
  for (const auto& [owner, owned] : by_owner) {
    if (owner == agent.rank()) {
      std::vector<at::Tensor> values;
      for (const auto& parameter : owned) values.push_back(parameter.local_value());
      local_ = agent.local<LocalOptimizers>().find_or_make(values, fields, 1);
    } else {
      remote_.push_back(agent.rpc_sync<&attach>(owner, owned, fields, participants));
    }
  }
}

void DistributedOptimizer::step(const std::vector<uint64_t>& contexts) {
  const at::NoGradGuard no_grad;
  const rpc::ContextScope outside(0);  // an update is no part of the pass
  const int participant = sharing_.mode == Sharing::Mode::kSync ? sharing_.participant : 0;
  std::vector<base::Future<void>> steps;
  for (const auto& optimizer : remote_) {
    steps.push_back(
        agent_.rpc_async<&step_here>(optimizer.owner(), optimizer, contexts, participant));
  }
  if (local_) local_->step(0, gradients_of(agent_, *local_, contexts)).wait();
  base::wait_all(steps);
}

}  // namespace distrain::optim
