#pragma once

#include <span>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/optim/update_rule.h"

namespace distrain::optim {

using Gradients = std::vector<at::Tensor>;  ///< by parameter; undefined if there is no gradient

/// Returns the mean of each parameter's gradients, summed in the order of `gathered`, which must
/// not be empty. An undefined gradient counts as zero; if all are undefined, the mean is undefined.
inline Gradients mean_of(const std::vector<Gradients>& gathered) {
  if (gathered.size() == 1) return gathered[0];
  Gradients means;
  for (size_t i = 0; i < gathered[0].size(); ++i) {
    at::Tensor sum;
    for (const Gradients& gradients : gathered) sum = sum_of(sum, gradients[i]);
    means.push_back(sum.defined() ? sum / static_cast<double>(gathered.size()) : sum);
  }
  return means;
}

/// Throws `invalid` if two parameters share memory. `groups` has the group of each parameter.
inline void check_each_once(const std::vector<at::Tensor>& parameters,
                            const std::vector<uint64_t>& groups) {
  std::map<const void*, uint64_t> by_storage;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const void* storage = parameters[i].storage().unsafeGetStorageImpl();
    const auto [known, is_first] = by_storage.emplace(storage, groups[i]);
    if (is_first) continue;
    const std::string group = std::to_string(groups[i]), first = std::to_string(known->second);
    if (group != first)
      base::invalid("a parameter of group " + group + " is in group " + first + ", too");
    base::invalid("two of the parameters of group " + group +
                  " share their memory: give a tied one once");
  }
}

/// Parameters and their groups' update rules, which hold the parameters' state. Not thread-safe.
class ParameterSet {
 public:
  /// Adds a group of parameters, all of which are updated with `options`.
  void add_group(const OptimizerOptions& options, std::span<const at::Tensor> parameters) {
    parameters_.insert(parameters_.end(), parameters.begin(), parameters.end());
    groups_.resize(parameters_.size(), rules_.size());
    rules_.push_back(std::make_unique<UpdateRule>(options));
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  void set_lr_factor(double factor) {
    for (const auto& rule : rules_) rule->set_lr_factor(factor);
  }
  /// Throws `invalid` if apply() would reject one of `gradients`.
  void check(const Gradients& gradients) const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (gradients[i].defined()) rule_of(i).check(i, parameters_[i], gradients[i]);
    }
  }
  /// Updates parameter `i` with `gradient` times `scale`. Does nothing if `gradient` is undefined.
  void apply(size_t i, const at::Tensor& gradient, double scale) {
    if (!gradient.defined()) return;
    rule_of(i).apply(i, parameters_[i], gradient, scale);
  }

  /// Returns the state without copying, so the next update changes the returned tensors.
  std::vector<ParameterState> state() const {
    std::vector<ParameterState> states;
    for (size_t i = 0; i < parameters_.size(); ++i) states.push_back(rule_of(i).state(i));
    return states;
  }
  /// Returns copies of `state` for adopt(). Throws `bad_data` if a state does not fit.
  std::vector<UpdateRule::Loaded> load(std::span<const ParameterState> state) const {
    std::vector<UpdateRule::Loaded> loaded;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      loaded.push_back(rule_of(i).load(i, parameters_[i], state[i]));
    }
    return loaded;
  }
  void adopt(std::vector<UpdateRule::Loaded> loaded) {
    for (size_t i = 0; i < parameters_.size(); ++i) rule_of(i).adopt(i, std::move(loaded[i]));
  }

 private:
  UpdateRule& rule_of(size_t i) const { return *rules_[groups_[i]]; }

  std::vector<at::Tensor> parameters_;
  std::vector<size_t> groups_;  // each parameter's index in `rules_`
  std::vector<std::unique_ptr<UpdateRule>> rules_;
};

}  // namespace distrain::optim
