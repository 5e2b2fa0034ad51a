#include "local_optimizer.h"

#include <ATen/Functions.h>

namespace distrain::optim {

namespace {

// The mean in the order of the participants, so that it does not depend on who came first. One
// without a gradient counts as zero.
at::Tensor mean(const std::map<int, LocalOptimizer::Gradients>& gathered, size_t parameter) {
  at::Tensor sum;
  for (const auto& [participant, gradients] : gathered) {
    const at::Tensor& gradient = gradients[parameter];
    if (!gradient.defined()) continue;
    if (!sum.defined()) {
      sum = gradient;
    } else if (sum.is_sparse() && !gradient.is_sparse()) {
      sum = gradient + sum;  // torch adds sparse to dense, not dense to sparse
    } else {
      sum = sum + gradient;
    }
  }
  return sum.defined() ? sum / static_cast<double>(gathered.size()) : sum;
}

}  // namespace

LocalOptimizer::LocalOptimizer(std::vector<at::Tensor> parameters, OptimizerFields options,
                               int participants, std::shared_ptr<std::atomic<uint64_t>> updates)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      participants_(participants),
      rule_(make_update_rule(from_fields(options_))),
      updates_(std::move(updates)) {}

base::Future<void> LocalOptimizer::step(int participant, Gradients gradients) {
  if (participant < 0 || participant >= participants_ || gradients.size() != parameters_.size()) {
    throw base::Exception(base::ErrorKind::kInvalid, "a step of an unknown participant");
  }
  std::vector<base::Promise<void>> applied;
  base::Future<void> future;
  {
    std::lock_guard lock(mutex_);
    if (participants_ == 1) {
      apply_locked(gradients);
      return base::Future<void>::ready({});
    }
    if (!gathered_.emplace(participant, std::move(gradients)).second) {
      throw base::Exception(
          base::ErrorKind::kInvalid,
          "participant " + std::to_string(participant) + " made two steps before all had made one");
    }
    future = waiting_.emplace_back().future();
    if (static_cast<int>(gathered_.size()) < participants_) return future;
    applied.swap(waiting_);
    const auto gathered = std::exchange(gathered_, {});
    Gradients means;
    for (size_t i = 0; i < parameters_.size(); ++i) means.push_back(mean(gathered, i));
    try {
      apply_locked(means);
    } catch (...) {
      const base::Error error = base::current_error(base::ErrorKind::kInternal);
      for (auto& promise : applied) promise.fail(error);
      return future;
    }
  }
  for (auto& promise : applied) promise.set();
  return future;
}

void LocalOptimizer::apply_locked(const Gradients& gradients) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (gradients[i].defined()) rule_->apply(i, parameters_[i], gradients[i]);
  }
  updates_->fetch_add(1);
}

void LocalOptimizer::check_same(const std::vector<at::Tensor>& parameters,
                                const OptimizerFields& options, int participants) const {
  const auto differ = [](const std::string& what) {
    throw base::Exception(base::ErrorKind::kInvalid,
                          "these parameters have an optimizer already, with other " + what);
  };
  if (parameters.size() != parameters_.size()) differ("parameters beside them");
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].is_same(parameters_[i])) differ("parameters beside them");
  }
  if (options.name != options_.name || options.values != options_.values) differ("options");
  if (participants != participants_) differ("participants");
}

std::shared_ptr<LocalOptimizer> LocalOptimizers::find_or_make(
    const std::vector<at::Tensor>& parameters, const OptimizerFields& options, int participants) {
  std::lock_guard lock(mutex_);
  std::erase_if(optimizers_, [](const auto& known) { return known.second.expired(); });
  // Of any of them: a parameter must not be in two optimizers.
  for (const at::Tensor& parameter : parameters) {
    const auto it = optimizers_.find(parameter.unsafeGetTensorImpl());
    if (it == optimizers_.end()) continue;
    auto optimizer = it->second.lock();
    if (!optimizer) continue;
    optimizer->check_same(parameters, options, participants);
    return optimizer;
  }
  auto made = std::make_shared<LocalOptimizer>(parameters, options, participants, updates_);
  for (const at::Tensor& parameter : parameters)
    optimizers_[parameter.unsafeGetTensorImpl()] = made;
  return made;
}

}  // namespace distrain::optim
