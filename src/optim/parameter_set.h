#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/optim/update_rule.h"

namespace distrain::optim {

using Gradients = std::vector<at::Tensor>;  ///< by parameter; undefined if there is no gradient

/// Returns the mean of each parameter's gradients, summed in the order of `gathered`, which must
/// not be empty. An undefined gradient counts as zero; if all are undefined, the mean is undefined.
Gradients mean_of(const std::vector<Gradients>& gathered);

/// Throws `invalid` if two parameters share memory. `group_of(i)` returns the group of parameter i.
void check_each_once(const std::vector<at::Tensor>& parameters,
                     const std::function<uint64_t(size_t)>& group_of);

/// Parameters and their groups' update rules, which hold the parameters' state. Not thread-safe.
class ParameterSet {
 public:
  /// Adds parameters with the same options.
  void add_group(const OptimizerOptions& options, std::span<const at::Tensor> parameters);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// Returns the index of the group of parameter `i`.
  size_t group_of(size_t i) const { return groups_[i]; }
  void set_lr_factor(double factor);
  /// Throws `invalid` if apply() would not take one of `gradients`.
  void check(const Gradients& gradients) const;
  /// Updates parameter `i` with `gradient` times `scale`. Does nothing if `gradient` is undefined.
  void apply(size_t i, const at::Tensor& gradient, double scale);

  /// Returns the tensors of the state themselves, which the next update changes.
  std::vector<ParameterState> state() const;
  /// Returns copies of `state`, one for each parameter, for adopt(). Throws `bad_data` on mismatch.
  std::vector<UpdateRule::Loaded> load(std::span<const ParameterState> state) const;
  void adopt(std::vector<UpdateRule::Loaded> loaded);

 private:
  UpdateRule& rule_of(size_t i) const { return *rules_[groups_[i]]; }

  std::vector<at::Tensor> parameters_;
  std::vector<size_t> groups_;  // each parameter's index in `rules_`
  std::vector<std::unique_ptr<UpdateRule>> rules_;
};

}  // namespace distrain::optim
