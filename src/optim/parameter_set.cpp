#include "parameter_set.h"

#include <map>
#include <string>
#include <utility>

#include <ATen/Functions.h>

#include "distrain/base/error.h"

namespace distrain::optim {

Gradients mean_of(const std::vector<Gradients>& gathered) {
  if (gathered.size() == 1) return gathered[0];
  Gradients means;
  for (size_t i = 0; i < gathered[0].size(); ++i) {
    at::Tensor sum;
    for (const Gradients& gradients : gathered) {
      const at::Tensor& gradient = gradients[i];
      if (gradient.defined()) sum = sum.defined() ? sum_of(sum, gradient) : gradient;
    }
    means.push_back(sum.defined() ? sum / static_cast<double>(gathered.size()) : sum);
  }
  return means;
}

void check_each_once(const std::vector<at::Tensor>& parameters,
                     const std::function<uint64_t(size_t)>& group_of) {
  std::map<const void*, uint64_t> groups;  // by storage
  for (size_t i = 0; i < parameters.size(); ++i) {
    const uint64_t group = group_of(i);
    const auto [known, first] =
        groups.emplace(parameters[i].storage().unsafeGetStorageImpl(), group);
    if (first) continue;
    base::invalid(known->second == group
                      ? "two of the parameters of group " + std::to_string(group) +
                            " share their memory: give a tied one once"
                      : "a parameter of group " + std::to_string(group) + " is in group " +
                            std::to_string(known->second) + ", too");
  }
}

void ParameterSet::add_group(const OptimizerOptions& options,
                             std::span<const at::Tensor> parameters) {
  parameters_.insert(parameters_.end(), parameters.begin(), parameters.end());
  groups_.resize(parameters_.size(), rules_.size());
  rules_.push_back(make_update_rule(options));
}

void ParameterSet::set_lr_factor(double factor) {
  for (const auto& rule : rules_) rule->set_lr_factor(factor);
}

void ParameterSet::check(const Gradients& gradients) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (gradients[i].defined()) rule_of(i).check(i, parameters_[i], gradients[i]);
  }
}

void ParameterSet::apply(size_t i, const at::Tensor& gradient, double scale) {
  if (!gradient.defined()) return;
  rule_of(i).apply(i, parameters_[i], scale == 1 ? gradient : gradient * scale);
}

std::vector<ParameterState> ParameterSet::state() const {
  std::vector<ParameterState> states;
  for (size_t i = 0; i < parameters_.size(); ++i) states.push_back(rule_of(i).state(i));
  return states;
}

std::vector<UpdateRule::Loaded> ParameterSet::load(std::span<const ParameterState> state) const {
  std::vector<UpdateRule::Loaded> loaded;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    loaded.push_back(rule_of(i).load(i, parameters_[i], state[i]));
  }
  return loaded;
}

void ParameterSet::adopt(std::vector<UpdateRule::Loaded> loaded) {
  for (size_t i = 0; i < parameters_.size(); ++i) rule_of(i).adopt(i, std::move(loaded[i]));
}

}  // namespace distrain::optim
