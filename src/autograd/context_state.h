#pragma once

#include "pass.h"

namespace distrain::autograd {

// Note [Passes of a context]
//
// The initiator (the rank that calls backward()) runs one pass at a time and numbers passes
// upwards, so each rank keeps only the newest:
//
//   Over ──> Running ──> Ran ──> Over        (the last arrow on the initiator only)
//     │         │ ^       │
//     └──> Failed ┴<──────┘
//
// Over: no pass is in flight. Running: this rank's part of the graph runs; new hooks belong to this
// pass, otherwise to the next one. Ran: all nodes of this rank have run, perhaps not those of other
// ranks. Failed: the pass has failed on this rank or another one.
//
// On the initiator, a pass begins in Over or Failed only. On another rank, the first gradients of a
// newer pass begin it in any state, because the initiator has ended the older pass. Late messages
// of an older pass change nothing. If a pass fails before it begins here, its hooks are dropped,
// its guard is called with the error, and its gradients are refused.

/// Autograd id, rank and function of each reply whose tensors require a gradient.
using CallResults = std::vector<std::tuple<uint64_t, int, std::string>>;

/// The state of a context on one rank. Thread-safe.
class ContextState {
 public:
  using ReadyHook = std::function<void(const at::Tensor&)>;
  using Attachment = std::pair<const void*, std::shared_ptr<void>>;  // an owner and its object

  explicit ContextState(uint64_t id) : id_(id) {}
  uint64_t id() const { return id_; }

  void add_participant(int rank) {
    std::lock_guard lock(mutex_);
    participants_.insert(rank);
  }
  std::set<int> participants() const {
    std::lock_guard lock(mutex_);
    return participants_;
  }

  void add_result(uint64_t autograd_id, int from, const std::string& function) {
    std::lock_guard lock(mutex_);
    results_.emplace_back(autograd_id, from, function);
  }
  CallResults results() const {
    std::lock_guard lock(mutex_);
    return results_;
  }

  /// Adds `node`. If the caller has given up the call that `node` answers, only returns false.
  bool add_send(uint64_t autograd_id, const std::shared_ptr<SendNode>& node) {
    std::lock_guard lock(mutex_);
    if (node->answered != 0 && given_up_.contains({node->to, node->answered})) return false;
    sends_.emplace(autograd_id, node);
    return true;
  }
  std::shared_ptr<SendNode> send(uint64_t autograd_id) const {
    std::lock_guard lock(mutex_);
    const auto it = sends_.find(autograd_id);
    return it == sends_.end() ? nullptr : it->second;
  }
  std::vector<std::shared_ptr<SendNode>> sends() const {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<SendNode>> nodes;
    for (const auto& [id, node] : sends_) nodes.push_back(node);
    return nodes;
  }
  /// Removes a send node that will get no gradient, so that later passes do not wait for it.
  /// Returns the node, which must not be destroyed on the loop thread.
  std::shared_ptr<SendNode> remove_send(uint64_t autograd_id) {
    std::lock_guard lock(mutex_);
    auto taken = sends_.extract(autograd_id);
    return taken ? std::move(taken.mapped()) : nullptr;
  }
  /// Removes and returns the node that answers `call` of `caller`. A later add_send() rejects it.
  std::shared_ptr<SendNode> give_up(int caller, uint64_t call);

  /// Begins a pass on the initiator. Throws `invalid` if another pass is in flight.
  void begin_pass(std::shared_ptr<Pass> pass) {
    std::lock_guard lock(mutex_);
    if (!transition_locked(PassEvent::kBegin, pass->id())) {
      base::invalid("another backward pass over this context is under way: one at a time");
    }
    pass_.swap(pass);
  }
  /// Ends a pass on the initiator, when all ranks are done.
  void finish_pass(uint64_t id) {
    std::shared_ptr<Pass> ended;
    std::lock_guard lock(mutex_);
    if (transition_locked(PassEvent::kFinish, id)) ended.swap(pass_);
  }
  /// Returns the pass `id` on a rank that is not the initiator. Creates it with `make` if the rank
  /// does not have it. Throws `cancelled` if the pass has failed or a newer one has begun.
  std::shared_ptr<Pass> pass_or(uint64_t id, const std::function<std::shared_ptr<Pass>()>& make);
  /// Fails the pass `id` on this rank: drops its hooks and calls its guard's on_failure. Returns
  /// false and does nothing if the pass is over or failed. Must not run on the loop thread.
  bool fail_pass(uint64_t id, const base::Error& error);
  /// Does the part of fail_pass() that may run on the loop thread; Failing::end() does the rest.
  struct Failing;
  std::optional<Failing> begin_failing(uint64_t id);

  /// Adds `gradient` to the gradient of `variable`, in the current stream of its device. Takes
  /// ownership of `gradient`, but copies it if it is shared, because leaves must not share
  /// gradients. Returns false and does nothing if `pass` is not 0 and does not run on this rank.
  bool accumulate(const at::Tensor& variable, at::Tensor gradient, uint64_t pass = 0);
  at::Tensor gradient(const at::Tensor& variable) const {
    std::lock_guard lock(mutex_);
    const auto it = gradients_.find(variable.unsafeGetTensorImpl());
    return it == gradients_.end() ? at::Tensor() : read(it->second);
  }
  void set_gradient(const at::Tensor& variable, at::Tensor gradient) {
    const auto producer = producer_of(gradient);
    std::lock_guard lock(mutex_);
    gradients_[variable.unsafeGetTensorImpl()] = {variable, std::move(gradient), producer};
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const {
    std::lock_guard lock(mutex_);
    return gradients_locked();
  }
  /// Returns all gradients and removes them from the context.
  std::vector<std::pair<at::Tensor, at::Tensor>> take_gradients() {
    std::lock_guard lock(mutex_);
    auto all = gradients_locked();
    gradients_.clear();
    return all;
  }

  void attach(Attachment attachment) {
    std::lock_guard lock(mutex_);
    attachments_.push_back(std::move(attachment));
  }
  std::vector<std::shared_ptr<void>> attachments_of(const void* owner) const {
    std::vector<std::shared_ptr<void>> its;
    std::lock_guard lock(mutex_);
    for (const auto& [attached_by, object] : attachments_) {
      if (attached_by == owner) its.push_back(object);
    }
    return its;
  }
  std::vector<Attachment> take_attachments() {
    std::lock_guard lock(mutex_);
    return std::exchange(attachments_, {});
  }

  void on_gradient_ready(const at::Tensor& variable, ReadyHook fn) {
    std::lock_guard lock(mutex_);
    hooks_.ready[variable.unsafeGetTensorImpl()].push_back(std::move(fn));
  }
  /// Registers `fn` for the end of a pass. Returns false if `pass` is neither 0 nor a running pass.
  bool on_pass_end(std::function<void()> fn, uint64_t pass = 0) {
    std::lock_guard lock(mutex_);
    if (pass != 0 && !runs_locked(pass)) return false;
    hooks_.end.push_back(std::move(fn));
    return true;
  }
  /// Returns true while this rank's part of `pass` runs, or of any pass if `pass` is 0.
  bool runs(uint64_t pass = 0) const {
    std::lock_guard lock(mutex_);
    return runs_locked(pass == 0 ? newest_ : pass);
  }
  /// Returns true if a pass has failed, so that the gradients may be those of a part of the graph.
  bool pass_failed() const {
    std::lock_guard lock(mutex_);
    return has_failed_;
  }
  void set_guard(PassGuard guard) {
    std::lock_guard lock(mutex_);
    hooks_.guard = std::move(guard);
  }
  /// Returns `admit` of the current PassGuard; null if arriving gradients need not wait.
  std::function<base::Future<void>()> admission() const {
    std::lock_guard lock(mutex_);
    return hooks_.guard.admit;
  }
  std::vector<ReadyHook> take_ready_hooks(uint64_t pass, const at::Tensor& variable) {
    std::lock_guard lock(mutex_);
    if (!runs_locked(pass)) return {};
    auto taken = hooks_.ready.extract(variable.unsafeGetTensorImpl());
    return taken ? std::move(taken.mapped()) : std::vector<ReadyHook>();
  }
  /// Marks this rank's part of the pass as finished. Returns the end hooks, which the caller runs.
  std::vector<std::function<void()>> end_hooks_of(uint64_t pass);

 private:
  enum class PassState : uint8_t { kOver, kRunning, kRan, kFailed };
  enum class PassEvent : uint8_t { kBegin, kBeginByGradients, kRun, kFinish, kFail };
  /// Applies `event` to the state machine. Returns false if the current state ignores the event.
  bool transition_locked(PassEvent event, uint64_t id);
  struct Hooks {
    std::unordered_map<const c10::TensorImpl*, std::vector<ReadyHook>> ready;
    std::vector<std::function<void()>> end;
    PassGuard guard;
  };
  struct Entry {
    at::Tensor variable;
    at::Tensor gradient;
    std::optional<c10::Stream> producer;     // the stream that computes the gradient
    mutable bool is_read_elsewhere = false;  // another stream may still read the gradient
  };
  static const at::Tensor& read(const Entry& entry) {
    if (wait_for_producer(entry.gradient, entry.producer)) entry.is_read_elsewhere = true;
    return entry.gradient;
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_locked() const {
    std::vector<std::pair<at::Tensor, at::Tensor>> all;
    for (const auto& [impl, entry] : gradients_) all.emplace_back(entry.variable, read(entry));
    return all;
  }
  bool runs_locked(uint64_t pass) const {
    return pass == newest_ && pass_state_ == PassState::kRunning;
  }

  const uint64_t id_;
  mutable std::mutex mutex_;
  std::set<int> participants_;  // ranks that exchanged a message of the context with this one
  CallResults results_;
  std::unordered_map<uint64_t, std::shared_ptr<SendNode>> sends_;
  std::set<std::pair<int, uint64_t>> given_up_;  // calls to this rank, by (caller, call number)
  std::unordered_map<const c10::TensorImpl*, Entry> gradients_;
  std::vector<Attachment> attachments_;
  Hooks hooks_;
  std::shared_ptr<Pass> pass_;  // the newest; null if it has not begun here, has failed or is over
  uint64_t newest_ = 0;         // the number of the newest pass
  PassState pass_state_ = PassState::kOver;
  bool has_failed_ = false;  // true if any pass has failed
};

/// A failed pass and its hooks, until end() destroys the hooks.
struct ContextState::Failing {
  /// Fails the pass, calls on_failure and destroys the hooks. Must not run on the loop thread.
  void end(const base::Error& error);

  std::shared_ptr<Pass> pass;
  Hooks hooks;
};

}  // namespace distrain::autograd
