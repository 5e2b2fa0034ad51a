#include "distrain/optim/distributed_optimizer.h"

#include <map>

#include <ATen/Functions.h>

#include "local_optimizer.h"

namespace distrain::optim {

namespace {

// What the ranks call on each other.

rpc::RRef<LocalOptimizer> attach(rpc::CallContext& context,
                                 const std::vector<rpc::RRef<at::Tensor>>& parameters,
                                 const SharedTerms& terms) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) values.push_back(parameter.local_value());
  return context.agent.make_rref(
      context.agent.local<LocalOptimizers>().find_or_make(values, terms));
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

base::Future<uint64_t> step_here(rpc::CallContext& context,
                                 const rpc::RRef<LocalOptimizer>& optimizer,
                                 const std::vector<uint64_t>& contexts, int participant,
                                 double scale) {
  const at::NoGradGuard no_grad;
  LocalOptimizer& here = optimizer.local_value();
  return here.step(participant, gradients_of(context.agent, here, contexts), scale);
}

base::Future<double> norm_here(rpc::CallContext& context,
                               const rpc::RRef<LocalOptimizer>& optimizer,
                               const std::vector<uint64_t>& contexts, int participant) {
  const at::NoGradGuard no_grad;
  LocalOptimizer& here = optimizer.local_value();
  return here.norm_squared(participant, gradients_of(context.agent, here, contexts));
}

void set_lr_here(const rpc::RRef<LocalOptimizer>& optimizer, double lr) {
  optimizer.local_value().set_lr(lr);
}

std::vector<ParameterState> state_here(const rpc::RRef<LocalOptimizer>& optimizer) {
  return optimizer.local_value().state();
}

void load_state_here(const rpc::RRef<LocalOptimizer>& optimizer,
                     const std::vector<ParameterState>& state) {
  optimizer.local_value().load_state(state);
}

template <class T>
std::vector<T> picked(const std::vector<T>& from, const std::vector<size_t>& places) {
  std::vector<T> some;
  for (const size_t place : places) some.push_back(from[place]);
  return some;
}

void put(std::vector<ParameterState>& into, const std::vector<size_t>& places,
         std::vector<ParameterState> states) {
  for (size_t i = 0; i < places.size(); ++i) into[places[i]] = std::move(states.at(i));
}

}  // namespace

UpdateCount install(rpc::Agent& agent) {
  const auto optimizers = std::make_shared<LocalOptimizers>(agent);
  agent.provide(optimizers);
  agent.expose<&attach>("distrain.optim.attach");
  agent.expose<&step_here>("distrain.optim.step");
  agent.expose<&norm_here>("distrain.optim.norm");
  agent.expose<&set_lr_here>("distrain.optim.set_lr");
  agent.expose<&state_here>("distrain.optim.state");
  agent.expose<&load_state_here>("distrain.optim.load_state");
  return optimizers->updates();
}

Progress progress_of(rpc::Agent& agent, const at::Tensor& parameter, int participant) {
  const auto optimizer = agent.local<LocalOptimizers>().find(parameter);
  if (!optimizer) {
    throw base::Exception(base::ErrorKind::kNotFound, "this parameter has no optimizer");
  }
  return optimizer->progress(participant);
}

DistributedOptimizer::DistributedOptimizer(rpc::Agent& agent,
                                           const std::vector<rpc::RRef<at::Tensor>>& parameters,
                                           const OptimizerOptions& options, Sharing sharing)
    : agent_(agent), sharing_(sharing), parameters_(parameters.size()) {
  std::map<int, std::vector<size_t>> by_owner;
  for (size_t i = 0; i < parameters.size(); ++i) by_owner[parameters[i].owner()].push_back(i);
  const SharedTerms shared{to_fields(options), sharing.mode, sharing.participants,
                           sharing.staleness};
  SharedTerms own;
  own.options = shared.options;
  for (const auto& [owner, places] : by_owner) {
    const auto owned = picked(parameters, places);
    if (owner == agent.rank()) {
      std::vector<at::Tensor> values;
      for (const auto& parameter : owned) values.push_back(parameter.local_value());
      local_ = agent.local<LocalOptimizers>().find_or_make(
          values, sharing.participant == Sharing::kOnlooker ? shared : own);
      local_parameters_ = places;
    } else {
      remote_.push_back({agent.rpc_sync<&attach>(owner, owned, shared), places});
    }
  }
}

int DistributedOptimizer::participant() const {
  if (sharing_.participant == Sharing::kOnlooker) {
    throw base::Exception(base::ErrorKind::kInvalid, "an onlooker makes no steps");
  }
  return sharing_.participant;
}

// A call that waits for other participants lasts as long as they take: the owner's and their death
// end it.
rpc::To DistributedOptimizer::owner_of(const Owned& owned, bool waits) const {
  rpc::To owner(owned.optimizer.owner());
  if (waits && sharing_.participants > 1) owner.without_deadline();
  return owner;
}

uint64_t DistributedOptimizer::step(const std::vector<uint64_t>& contexts, double max_norm) {
  const at::NoGradGuard no_grad;
  const rpc::ContextScope outside(0);  // an update is no part of the pass
  const double scale = max_norm > 0 ? scale_for(contexts, max_norm) : 1.0;
  const bool waits = sharing_.mode != Sharing::Mode::kAsync;
  std::vector<base::Future<uint64_t>> steps;
  for (const Owned& owned : remote_) {
    steps.push_back(agent_.rpc_async<&step_here>(owner_of(owned, waits), owned.optimizer, contexts,
                                                 participant(), scale));
  }
  uint64_t updates = 0;
  if (local_) updates = local_->step(0, gradients_of(agent_, *local_, contexts), scale).wait();
  base::wait_all(steps);
  return steps.empty() ? updates : steps.front().wait();
}

double DistributedOptimizer::scale_for(const std::vector<uint64_t>& contexts,
                                       double max_norm) const {
  std::vector<base::Future<double>> norms;
  for (const Owned& owned : remote_) {
    norms.push_back(agent_.rpc_async<&norm_here>(owner_of(owned, true), owned.optimizer, contexts,
                                                 participant()));
  }
  double squared = local_ ? norm_squared(gradients_of(agent_, *local_, contexts)) : 0;
  base::wait_all(norms);
  for (const auto& norm : norms) squared += norm.wait();
  return clip_scale(squared, max_norm);
}

void DistributedOptimizer::set_lr(double lr) {
  std::vector<base::Future<void>> set;
  for (const Owned& owned : remote_) {
    set.push_back(agent_.rpc_async<&set_lr_here>(owned.optimizer.owner(), owned.optimizer, lr));
  }
  if (local_) local_->set_lr(lr);
  base::wait_all(set);
}

std::vector<ParameterState> DistributedOptimizer::state() const {
  std::vector<ParameterState> all(parameters_);
  for (const Owned& owned : remote_) {
    put(all, owned.parameters,
        agent_.rpc_sync<&state_here>(owned.optimizer.owner(), owned.optimizer));
  }
  if (local_) put(all, local_parameters_, local_->state());
  return all;
}

std::vector<ParameterState> DistributedOptimizer::local_state() const {
  return local_ ? local_->state() : std::vector<ParameterState>();
}

void DistributedOptimizer::load_local_state(const std::vector<ParameterState>& state) {
  if (local_) local_->load_state(state);
}

void DistributedOptimizer::load_state(const std::vector<ParameterState>& state) {
  if (state.size() != parameters_) {
    throw base::Exception(base::ErrorKind::kBadData,
                          "the state of " + std::to_string(state.size()) + " parameters, not of " +
                              std::to_string(parameters_));
  }
  for (const Owned& owned : remote_) {
    agent_.rpc_sync<&load_state_here>(owned.optimizer.owner(), owned.optimizer,
                                      picked(state, owned.parameters));
  }
  if (local_) local_->load_state(picked(state, local_parameters_));
}

}  // namespace distrain::optim
