#include "context_state.h"

#include <algorithm>
#include <utility>

#include <ATen/SparseTensorImpl.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "distrain/rpc/error.h"
#include "streams.h"

namespace distrain::autograd {

namespace {

bool is_own_memory(const at::Tensor& tensor) {
  return tensor.storage().use_count() == 1 && tensor.is_non_overlapping_and_dense();
}

// Nobody else has this tensor or its memory, and each of its elements is there once.
bool is_own(const at::Tensor& tensor) {
  if (tensor.use_count() > 1) return false;
  if (!tensor.is_sparse()) return is_own_memory(tensor);
  // Not _indices() and _values(): those give aliases, whose own counts tell nothing.
  const auto* const sparse = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  const at::Tensor indices = sparse->indices(), values = sparse->values();
  constexpr size_t kHereAndInTensor = 2;
  return indices.use_count() == kHereAndInTensor && is_own_memory(indices) &&
         values.use_count() == kHereAndInTensor && is_own_memory(values);
}

}  // namespace

void ContextState::add_participant(int rank) {
  std::lock_guard lock(mutex_);
  participants_.insert(rank);
}

std::set<int> ContextState::participants() const {
  std::lock_guard lock(mutex_);
  return participants_;
}

void ContextState::add_send(uint64_t autograd_id, std::shared_ptr<SendNode> node) {
  std::lock_guard lock(mutex_);
  sends_.emplace(autograd_id, std::move(node));
}

std::shared_ptr<SendNode> ContextState::send(uint64_t autograd_id) const {
  std::lock_guard lock(mutex_);
  const auto it = sends_.find(autograd_id);
  return it == sends_.end() ? nullptr : it->second;
}

std::vector<std::shared_ptr<SendNode>> ContextState::sends() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<SendNode>> nodes;
  for (const auto& [id, node] : sends_) nodes.push_back(node);
  return nodes;
}

std::shared_ptr<Pass> ContextState::pass(uint64_t id) const {
  std::lock_guard lock(mutex_);
  return pass_ && pass_->id() == id ? pass_ : nullptr;
}

void ContextState::set_pass(std::shared_ptr<Pass> pass) {
  std::lock_guard lock(mutex_);
  pass_.swap(pass);
}

std::shared_ptr<Pass> ContextState::pass_or(uint64_t id,
                                            const std::function<std::shared_ptr<Pass>()>& make) {
  if (auto known = pass(id)) return known;
  std::shared_ptr<Pass> made = make();
  std::lock_guard lock(mutex_);
  if (pass_ && pass_->id() == id) return pass_;  // another gradient's thread was quicker
  if (id <= ended_pass_ || (pass_ && pass_->id() > id)) {
    throw base::Exception(base::ErrorKind::kCancelled, "this pass has ended");
  }
  pass_.swap(made);
  return pass_;
}

std::optional<std::shared_ptr<Pass>> ContextState::end_pass(uint64_t id) {
  std::lock_guard lock(mutex_);
  if (id <= ended_pass_) return std::nullopt;
  ended_pass_ = id;
  std::shared_ptr<Pass> ended;
  if (pass_ && pass_->id() <= id) ended.swap(pass_);
  return ended;
}

const at::Tensor& ContextState::read(const Entry& entry) {
  if (follow(entry.gradient, entry.made)) entry.followed = true;
  return entry.gradient;
}

void ContextState::accumulate(const at::Tensor& variable, at::Tensor gradient) {
  std::lock_guard lock(mutex_);
  Entry& entry = gradients_[variable.unsafeGetTensorImpl()];
  if (!entry.gradient.defined()) {
    if (!is_own(gradient)) {
      gradient = gradient.is_sparse()
                     ? gradient.clone()
                     : torch::autograd::utils::clone_obey_contract(gradient, variable);
    }
    const auto made = made_under(gradient);
    entry = {variable, std::move(gradient), made};
    return;
  }
  // Nor does the device still read it for somebody who has seen it.
  const bool in_place = !entry.followed && !entry.gradient.is_sparse() && is_own(entry.gradient);
  follow(entry.gradient, entry.made);
  if (entry.gradient.is_sparse() && !gradient.is_sparse()) {
    entry.gradient = gradient + entry.gradient;  // torch adds sparse to dense, not dense to sparse
  } else if (in_place) {
    entry.gradient.add_(gradient);
  } else {
    entry.gradient = entry.gradient + gradient;
  }
  entry.followed = false;
  entry.made = made_under(entry.gradient);
}

at::Tensor ContextState::gradient(const at::Tensor& variable) const {
  std::lock_guard lock(mutex_);
  const auto it = gradients_.find(variable.unsafeGetTensorImpl());
  return it == gradients_.end() ? at::Tensor() : read(it->second);
}

void ContextState::set_gradient(const at::Tensor& variable, at::Tensor gradient) {
  const auto made = made_under(gradient);
  std::lock_guard lock(mutex_);
  gradients_[variable.unsafeGetTensorImpl()] = {variable, std::move(gradient), made};
}

std::vector<std::pair<at::Tensor, at::Tensor>> ContextState::gradients() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<at::Tensor, at::Tensor>> all;
  for (const auto& [impl, entry] : gradients_) all.emplace_back(entry.variable, read(entry));
  return all;
}

std::vector<std::pair<at::Tensor, at::Tensor>> ContextState::take_gradients() {
  std::vector<std::pair<at::Tensor, at::Tensor>> all;
  std::lock_guard lock(mutex_);
  for (const auto& [impl, entry] : gradients_) all.emplace_back(entry.variable, read(entry));
  gradients_.clear();
  return all;
}

void ContextState::on_gradient_ready(const at::Tensor& variable, ReadyHook fn) {
  std::lock_guard lock(mutex_);
  ready_hooks_[variable.unsafeGetTensorImpl()].push_back(std::move(fn));
}

void ContextState::on_pass_end(std::function<void()> fn) {
  std::lock_guard lock(mutex_);
  end_hooks_.push_back(std::move(fn));
}

void ContextState::set_guard(PassGuard guard) {
  std::lock_guard lock(mutex_);
  guard_ = std::move(guard);
}

std::function<base::Future<void>()> ContextState::admission() const {
  std::lock_guard lock(mutex_);
  return guard_.admit;
}

std::vector<ContextState::ReadyHook> ContextState::take_ready_hooks(const at::Tensor& variable) {
  std::lock_guard lock(mutex_);
  const auto it = ready_hooks_.find(variable.unsafeGetTensorImpl());
  if (it == ready_hooks_.end()) return {};
  std::vector<ReadyHook> hooks = std::move(it->second);
  ready_hooks_.erase(it);
  return hooks;
}

std::vector<std::function<void()>> ContextState::take_end_hooks() {
  std::lock_guard lock(mutex_);
  std::vector<std::function<void()>> hooks = std::exchange(end_hooks_, {});
  if (guard_.on_end) {
    hooks.push_back([guard = std::move(guard_)] {
      try {
        guard.on_end();
      } catch (...) {
        if (guard.on_failure)
          guard.on_failure(rpc::error_in_flight(base::ErrorKind::kRemoteFailed));
        throw;
      }
    });
  }
  guard_ = {};
  return hooks;
}

void ContextState::fail_hooks(const base::Error& error) {
  decltype(ready_hooks_) ready;
  decltype(end_hooks_) end;
  PassGuard guard;
  {
    std::lock_guard lock(mutex_);
    ready.swap(ready_hooks_);
    end.swap(end_hooks_);
    std::swap(guard, guard_);
  }
  if (guard.on_failure) guard.on_failure(error);
}

}  // namespace distrain::autograd
