#include "distrain/optim/single_process_optimizer.h"

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include "distrain/base/trace.h"
#include "parameter_set.h"

namespace distrain::optim {

static NamedParameters numbered(const torch::nn::Module& module) {
  NamedParameters result;
  for (const at::Tensor& parameter : module.parameters()) {
    result.emplace_back(std::to_string(result.size()), parameter);
  }
  return result;
}

NamedParameters named(const std::vector<std::string>& names,
                      const std::vector<at::Tensor>& parameters) {
  NamedParameters result;
  for (size_t i = 0; i < names.size(); ++i) result.emplace_back(names[i], parameters.at(i));
  return result;
}

struct SingleProcessOptimizer::Parameters {
  Parameters(const Rule& rule, const NamedParameters& named) {
    std::vector<at::Tensor> parameters;
    for (const auto& [name, parameter] : named) {
      names.push_back(name);
      parameters.push_back(parameter);
    }
    set.add_group(rule.options, parameters);
  }

  void apply(const Gradients& gradients, double scale) {
    for (size_t i = 0; i < gradients.size(); ++i) set.apply(i, gradients[i], scale);
  }

  std::vector<std::string> names;
  ParameterSet set;
  std::vector<Gradients> gathered;
};

SingleProcessOptimizer::SingleProcessOptimizer(const Rule& rule, const std::string& mode,
                                               NamedParameters shared, NamedParameters replicated)
    : max_norm_(rule.max_norm),
      sync_(mode == "sync"),
      shared_(std::make_unique<Parameters>(rule, shared)),
      replicated_(std::make_unique<Parameters>(rule, replicated)) {}

SingleProcessOptimizer::SingleProcessOptimizer(const torch::nn::Module& module, const Rule& rule,
                                               const std::string& mode)
    : SingleProcessOptimizer(rule, mode, mode.empty() ? NamedParameters() : numbered(module),
                             mode.empty() ? numbered(module) : NamedParameters()) {}

SingleProcessOptimizer::~SingleProcessOptimizer() = default;

void SingleProcessOptimizer::gather() {
  for (Parameters* each : {shared_.get(), replicated_.get()}) {
    Gradients gradients;
    for (const at::Tensor& parameter : each->set.parameters()) {
      gradients.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
    }
    each->gathered.push_back(std::move(gradients));
  }
  if (target_) gathered_.push_back(target_->gather());
}

// Clips as DistributedOptimizer does. The scale of an update is computed from the norm of its own
// and the replicas' gradients. If there is one update, the replicas are scaled by its scale,
// otherwise by a scale computed from the norm of the replicas' gradients alone.
void SingleProcessOptimizer::step() {
  const base::TraceScope scope("update");
  const at::NoGradGuard no_grad;
  if (shared_->gathered.empty() || (target_ && gathered_.size() < shared_->gathered.size())) {
    base::invalid("step() needs a gather() before it, and an add() before that");
  }
  std::vector<Gradients> updates = std::exchange(shared_->gathered, {});
  const Gradients replicated = mean_of(std::exchange(replicated_->gathered, {}));
  if (sync_) updates = {mean_of(updates)};
  const auto scale_of = [this](double squared) {
    return max_norm_ > 0 ? clip_scale(squared, max_norm_) : 1;
  };
  const auto norm = [this](const Gradients& gradients) {
    return max_norm_ > 0 ? norm_squared(gradients) : 0;
  };
  const double of_replicas = norm(replicated);
  double scale = scale_of(of_replicas);
  const std::vector<uint64_t> gathered = std::exchange(gathered_, {});
  for (size_t i = 0; i < updates.size(); ++i) {
    double squared = norm(updates[i]) + of_replicas;
    const auto its = sync_ || !target_ ? gathered : std::vector<uint64_t>{gathered[i]};
    const double trainers = target_ ? static_cast<double>(its.size()) : 1;
    if (target_) target_->check(its);
    if (target_ && max_norm_ > 0) {
      squared += target_->norm(its, {}).wait().shared / (trainers * trainers);
    }
    const double with_replicas = scale_of(squared);
    shared_->apply(updates[i], with_replicas);
    if (target_) target_->apply(its, {0, with_replicas / trainers, lr_factor_}).wait();
    if (updates.size() == 1) scale = with_replicas;
  }
  replicated_->apply(replicated, scale);
  updates_ += static_cast<int64_t>(updates.size());
}

void SingleProcessOptimizer::set_lr_factor(double factor) {
  shared_->set.set_lr_factor(factor);  // checks it
  replicated_->set.set_lr_factor(factor);
  lr_factor_ = factor;
}

bool SingleProcessOptimizer::has_replicas() const { return !replicated_->names.empty(); }

std::vector<std::string> SingleProcessOptimizer::names() const {
  std::vector<std::string> all = shared_->names;
  all.insert(all.end(), replicated_->names.begin(), replicated_->names.end());
  return all;
}

std::vector<ParameterState> SingleProcessOptimizer::state() const {
  std::vector<ParameterState> states = shared_->set.state();
  for (ParameterState& state : replicated_->set.state()) states.push_back(std::move(state));
  return states;
}

void SingleProcessOptimizer::load_state(const std::vector<ParameterState>& state) {
  const std::span all(state);
  auto shared = shared_->set.load(all);  // load() checks all states before adopt() changes any
  auto replicated = replicated_->set.load(all.subspan(shared.size()));
  shared_->set.adopt(std::move(shared));
  replicated_->set.adopt(std::move(replicated));
}

}  // namespace distrain::optim
