#include "local_optimizer.h"

#include <algorithm>
#include <set>

#include <ATen/Functions.h>

#include "distrain/autograd/parameter_versions.h"

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

LocalOptimizer::LocalOptimizer(rpc::Agent& agent, std::vector<at::Tensor> parameters,
                               SharedTerms terms, std::shared_ptr<std::atomic<uint64_t>> updates)
    : agent_(agent),
      parameters_(std::move(parameters)),
      terms_(std::move(terms)),
      rule_(make_update_rule(from_fields(terms_.options))),
      updates_(std::move(updates)),
      steps_(static_cast<size_t>(terms_.participants)) {
  std::set<const void*> storages;
  for (const at::Tensor& parameter : parameters_) {
    if (storages.insert(parameter.storage().unsafeGetStorageImpl()).second) continue;
    throw base::Exception(base::ErrorKind::kInvalid,
                          "two of the parameters share their memory: give a tied one once");
  }
}

void LocalOptimizer::check_participant(int participant, const Gradients& gradients) const {
  if (participant < 0 || participant >= terms_.participants ||
      gradients.size() != parameters_.size()) {
    throw base::Exception(base::ErrorKind::kInvalid, "a step of an unknown participant");
  }
}

template <class R>
base::Future<R> LocalOptimizer::bring(Gathering<R>& gathering, int participant,
                                      Gradients gradients) {
  if (!gathering.gradients.emplace(participant, std::move(gradients)).second) {
    throw base::Exception(base::ErrorKind::kInvalid, "participant " + std::to_string(participant) +
                                                         " made two steps before all had made one");
  }
  return gathering.waiting.emplace_back().future();
}

base::Future<uint64_t> LocalOptimizer::step(int participant, Gradients gradients, double scale) {
  check_participant(participant, gradients);
  return terms_.mode == Sharing::Mode::kSync
             ? step_together(participant, std::move(gradients), scale)
             : step_alone(participant, gradients, scale);
}

base::Future<uint64_t> LocalOptimizer::step_together(int participant, Gradients gradients,
                                                     double scale) {
  base::Future<uint64_t> future;
  std::vector<base::Promise<uint64_t>> applied;
  std::optional<base::Error> error;
  uint64_t updates = 0;
  {
    std::lock_guard lock(mutex_);
    future = bring(stepping_, participant, std::move(gradients));
    if (static_cast<int>(stepping_.gradients.size()) < terms_.participants) return future;
    auto all = std::exchange(stepping_, {});
    applied.swap(all.waiting);
    try {
      apply_locked(means(all.gradients), scale);
      for (int64_t& steps : steps_) ++steps;
      updates = applied_;
    } catch (...) {
      error = base::current_error(base::ErrorKind::kInternal);
    }
  }
  for (auto& promise : applied) {
    if (error) {
      promise.fail(*error);
    } else {
      promise.set(updates);
    }
  }
  return future;
}

base::Future<uint64_t> LocalOptimizer::step_alone(int participant, const Gradients& gradients,
                                                  double scale) {
  base::Promise<uint64_t> own;
  const base::Future<uint64_t> future = own.future();
  std::vector<Ahead> may_go_on;
  {
    std::lock_guard lock(mutex_);
    apply_locked(gradients, scale);
    ++steps_[static_cast<size_t>(participant)];
    ahead_.emplace(participant, Ahead{std::move(own), applied_});
    for (auto it = ahead_.begin(); it != ahead_.end();) {
      if (terms_.mode == Sharing::Mode::kSsp && lead_locked(it->first) > terms_.staleness) {
        ++it;
        continue;
      }
      may_go_on.push_back(std::move(it->second));
      it = ahead_.erase(it);
    }
  }
  for (auto& [promise, updates] : may_go_on) promise.set(updates);
  return future;
}

base::Future<double> LocalOptimizer::norm_squared(int participant, Gradients gradients) {
  check_participant(participant, gradients);
  base::Future<double> future;
  Gathering<double> all;
  {
    std::lock_guard lock(mutex_);
    future = bring(measuring_, participant, std::move(gradients));
    if (static_cast<int>(measuring_.gradients.size()) < terms_.participants) return future;
    all = std::exchange(measuring_, {});
  }
  double result = 0;
  if (terms_.mode == Sharing::Mode::kSync) {
    result = optim::norm_squared(means(all.gradients));
  } else {
    for (const auto& [who, theirs] : all.gradients) result += optim::norm_squared(theirs);
    result /= static_cast<double>(all.gradients.size());
  }
  for (auto& promise : all.waiting) promise.set(result);
  return future;
}

LocalOptimizer::Gradients LocalOptimizer::means(const std::map<int, Gradients>& gathered) const {
  Gradients all;
  for (size_t i = 0; i < parameters_.size(); ++i) all.push_back(mean(gathered, i));
  return all;
}

void LocalOptimizer::apply_locked(const Gradients& gradients, double scale) {
  const autograd::ParameterUpdate update(agent_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients[i].defined()) continue;
    if (!gradients[i].is_sparse()) update.unshare(parameters_[i]);
    rule_->apply(i, parameters_[i], scale == 1 ? gradients[i] : gradients[i] * scale);
  }
  ++applied_;
  updates_->fetch_add(1);
}

int64_t LocalOptimizer::lead_locked(int participant) const {
  return steps_[static_cast<size_t>(participant)] - *std::min_element(steps_.begin(), steps_.end());
}

void LocalOptimizer::check_same(const std::vector<at::Tensor>& parameters,
                                const SharedTerms& terms) const {
  const auto differ = [](const std::string& what) {
    throw base::Exception(base::ErrorKind::kInvalid,
                          "these parameters have an optimizer already, with other " + what);
  };
  if (parameters.size() != parameters_.size()) differ("parameters beside them");
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].is_same(parameters_[i])) differ("parameters beside them");
  }
  if (!(terms.options == terms_.options)) differ("options");
  if (!(terms == terms_)) differ("participants, mode or staleness");
}

void LocalOptimizer::set_lr(double lr) {
  std::lock_guard lock(mutex_);
  rule_->set_lr(lr);
}

std::vector<ParameterState> LocalOptimizer::state() const {
  std::lock_guard lock(mutex_);
  // What an update keeps is in order with its parameter.
  const autograd::ParameterRead read(agent_);
  std::vector<ParameterState> all;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    read.version(parameters_[i]);
    all.push_back(rule_->state(i));
    // Copies: the next step writes to what the rule keeps. On the CPU, as checkpoints have them and
    // every rank can be sent them.
    for (auto& [name, value] : all.back()) value = value.is_cpu() ? value.clone() : value.cpu();
  }
  return all;
}

void LocalOptimizer::load_state(const std::vector<ParameterState>& state) {
  if (state.size() != parameters_.size()) {
    throw base::Exception(base::ErrorKind::kBadData,
                          "the state of " + std::to_string(state.size()) + " parameters, not of " +
                              std::to_string(parameters_.size()));
  }
  std::lock_guard lock(mutex_);
  const autograd::ParameterUpdate update(agent_);
  for (size_t i = 0; i < state.size(); ++i) {
    update.unshare(parameters_[i]);
    rule_->load_state(i, parameters_[i], state[i]);
  }
}

Progress LocalOptimizer::progress(int participant) const {
  std::lock_guard lock(mutex_);
  return {applied_, lead_locked(participant)};
}

std::shared_ptr<LocalOptimizer> LocalOptimizers::find_or_make(
    const std::vector<at::Tensor>& parameters, const SharedTerms& terms) {
  std::lock_guard lock(mutex_);
  std::erase_if(optimizers_, [](const auto& known) { return known.second.expired(); });
  // Of any of them: a parameter must not be in two optimizers.
  for (const at::Tensor& parameter : parameters) {
    const auto it = optimizers_.find(parameter.unsafeGetTensorImpl());
    if (it == optimizers_.end()) continue;
    auto optimizer = it->second.lock();
    if (!optimizer) continue;
    optimizer->check_same(parameters, terms);
    return optimizer;
  }
  auto made = std::make_shared<LocalOptimizer>(agent_, parameters, terms, updates_);
  for (const at::Tensor& parameter : parameters)
    optimizers_[parameter.unsafeGetTensorImpl()] = made;
  return made;
}

std::shared_ptr<LocalOptimizer> LocalOptimizers::find(const at::Tensor& parameter) {
  std::lock_guard lock(mutex_);
  const auto it = optimizers_.find(parameter.unsafeGetTensorImpl());
  return it == optimizers_.end() ? nullptr : it->second.lock();
}

}  // namespace distrain::optim
