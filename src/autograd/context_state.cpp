#include "context_state.h"

#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

namespace distrain::autograd {

namespace {

bool is_own_memory(const at::Tensor& tensor) {
  return tensor.storage().use_count() == 1 && tensor.is_non_overlapping_and_dense();
}

// Returns true if no other handle shares `tensor` or its memory, and no two elements share memory.
bool is_own(const at::Tensor& tensor) { return tensor.use_count() == 1 && is_own_memory(tensor); }

// Returns `gradient`, or a copy of the parts of it that something else may share. The indices of a
// lookup's gradient are often the caller's input, whereas its much larger values are its own.
at::Tensor own_sparse(at::Tensor gradient) {
  if (gradient.use_count() > 1) return gradient.clone();
  // Read the impl, because the tensor's _indices() and _values() are aliases with own use counts.
  const auto* const sparse = static_cast<at::SparseTensorImpl*>(gradient.unsafeGetTensorImpl());
  const at::Tensor indices = sparse->indices(), values = sparse->values();
  constexpr size_t kHereAndInTensor = 2;
  const auto is_own_part = [](const at::Tensor& part) {
    return part.use_count() == kHereAndInTensor && is_own_memory(part);
  };
  if (!is_own_part(values)) return gradient.clone();
  if (is_own_part(indices)) return gradient;
  return at::_sparse_coo_tensor_unsafe(indices.clone(), values, gradient.sizes())
      ._coalesced_(gradient.is_coalesced());
}

}  // namespace

std::shared_ptr<SendNode> ContextState::give_up(int caller, uint64_t call) {
  std::lock_guard lock(mutex_);
  given_up_.emplace(caller, call);
  const auto it = std::find_if(sends_.begin(), sends_.end(), [&](const auto& send) {
    return send.second->to == caller && send.second->answered == call;
  });
  return it == sends_.end() ? nullptr : std::move(sends_.extract(it).mapped());
}

bool ContextState::transition_locked(PassEvent event, uint64_t id) {
  using enum PassState;
  const bool is_newest = id == newest_;
  switch (event) {
    case PassEvent::kBegin:
      if (pass_state_ == kRunning || pass_state_ == kRan) return false;
      [[fallthrough]];
    case PassEvent::kBeginByGradients:
      if (id <= newest_) return false;
      newest_ = id;
      pass_state_ = kRunning;
      return true;
    case PassEvent::kRun:
      if (!is_newest || pass_state_ != kRunning) return false;
      pass_state_ = kRan;
      return true;
    case PassEvent::kFinish:
      if (!is_newest || pass_state_ == kFailed) return false;
      pass_state_ = kOver;
      return true;
    case PassEvent::kFail:
      if (id < newest_ || (is_newest && (pass_state_ == kFailed || pass_state_ == kOver))) {
        return false;
      }
      newest_ = id;
      pass_state_ = kFailed;
      has_failed_ = true;
      return true;
  }
  return false;
}

std::shared_ptr<Pass> ContextState::pass_or(uint64_t id,
                                            const std::function<std::shared_ptr<Pass>()>& make) {
  const auto known_locked = [&] {
    return id == newest_ && pass_state_ != PassState::kFailed ? pass_ : nullptr;
  };
  {
    std::lock_guard lock(mutex_);
    if (auto known = known_locked()) return known;
  }
  const std::shared_ptr<Pass> pass = make();
  std::shared_ptr<Pass> before;
  {
    std::lock_guard lock(mutex_);
    if (auto known = known_locked()) return known;  // another thread has created it meanwhile
    if (!transition_locked(PassEvent::kBeginByGradients, id)) {
      throw base::Exception(base::ErrorKind::kCancelled, "this pass has ended");
    }
    before = std::exchange(pass_, pass);
  }
  if (before) before->end({base::ErrorKind::kCancelled, "a newer pass has begun"});
  return pass;
}

std::optional<ContextState::Failing> ContextState::begin_failing(uint64_t id) {
  std::lock_guard lock(mutex_);
  const bool has_run = id == newest_ && pass_state_ == PassState::kRan;
  if (!transition_locked(PassEvent::kFail, id)) return std::nullopt;
  Failing failing;
  failing.pass.swap(pass_);
  if (!has_run) std::swap(failing.hooks, hooks_);
  return failing;
}

bool ContextState::fail_pass(uint64_t id, const base::Error& error) {
  auto failing = begin_failing(id);
  if (failing) failing->end(error);
  return failing.has_value();
}

void ContextState::Failing::end(const base::Error& error) {
  const auto tell_hooks = [this, &error] {
    const Hooks told = std::exchange(hooks, {});
    if (told.guard.on_failure) told.guard.on_failure(error);
  };
  if (const auto ended = std::exchange(pass, nullptr)) return ended->end(error, tell_hooks);
  tell_hooks();
}

bool ContextState::accumulate(const at::Tensor& variable, at::Tensor gradient, uint64_t pass) {
  std::lock_guard lock(mutex_);
  if (pass != 0 && !runs_locked(pass)) return false;
  Entry& entry = gradients_[variable.unsafeGetTensorImpl()];
  if (!entry.gradient.defined()) {
    if (gradient.is_sparse()) {
      gradient = own_sparse(std::move(gradient));
    } else if (!is_own(gradient)) {
      gradient = torch::autograd::utils::clone_obey_contract(gradient, variable);
    }
    const auto producer = producer_of(gradient);
    entry = {variable, std::move(gradient), producer};
    return true;
  }
  const bool in_place =
      !entry.is_read_elsewhere && !entry.gradient.is_sparse() && is_own(entry.gradient);
  wait_for_producer(entry.gradient, entry.producer);
  if (entry.gradient.is_sparse() && !gradient.is_sparse()) {
    entry.gradient = gradient + entry.gradient;  // torch adds sparse to dense, not dense to sparse
  } else if (in_place) {
    entry.gradient.add_(gradient);
  } else {
    entry.gradient = entry.gradient + gradient;
  }
  entry.is_read_elsewhere = false;
  entry.producer = producer_of(entry.gradient);
  return true;
}

std::vector<std::function<void()>> ContextState::end_hooks_of(uint64_t pass) {
  std::lock_guard lock(mutex_);
  if (!transition_locked(PassEvent::kRun, pass)) return {};
  std::vector<std::function<void()>> hooks = std::exchange(hooks_.end, {});
  if (hooks_.guard.on_end) {
    hooks.push_back([guard = std::move(hooks_.guard)] {
      try {
        guard.on_end();
      } catch (...) {
        if (guard.on_failure)
          guard.on_failure(rpc::error_in_flight(base::ErrorKind::kRemoteFailed));
        throw;
      }
    });
  }
  hooks_.guard = {};
  return hooks;
}

}  // namespace distrain::autograd
