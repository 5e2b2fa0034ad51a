#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nodes.h"
#include "pass.h"

namespace distrain::autograd {

// Note [Passes of a context]
//
// The initiator begins the passes over a context one after the other and numbers them upwards, so a
// rank needs to know of the newest one only:
//
//   Over ──> Running ──> Ran ──> Over        (the initiator's)
//     │         │ ^       │
//     └──> Failed ┴<──────┘
//
//   Over      the initiator has none under way.
//   Running   this rank's part of the graph runs. Hooks are this pass's.
//   Ran       all of this rank's nodes and hooks have run; other ranks' may not. Hooks that come
//   now
//             are the next pass's, as they are while Over or Failed.
//   Failed    here or elsewhere.
//
// On the initiator a pass begins from Over or Failed only. On another rank the first gradients of a
// newer pass begin it whatever became of the one before: that is over, or they would not come. What
// is late for an older pass changes nothing. A pass may fail before it has begun here: who waits
// for it, such as at a gate, is told, and what comes for it then is refused.

/// What one rank holds of a context. Thread-safe.
class ContextState {
 public:
  using ReadyHook = std::function<void(const at::Tensor&)>;

  explicit ContextState(uint64_t id) : id_(id) {}

  uint64_t id() const { return id_; }

  void add_participant(int rank);
  std::set<int> participants() const;

  /// False, and it is not added, if it answers a call that was given up.
  bool add_send(uint64_t autograd_id, const std::shared_ptr<SendNode>& node);
  std::shared_ptr<SendNode> send(uint64_t autograd_id) const;
  std::vector<std::shared_ptr<SendNode>> sends() const;
  /// No gradient will come for this one: a pass that begins from now on does not wait for it. Gives
  /// it back: it is not to be destroyed on the loop.
  std::shared_ptr<SendNode> remove_send(uint64_t autograd_id);
  /// The same of the answer to call `call` of rank `caller`, whether it has been sent or not.
  std::shared_ptr<SendNode> give_up(int caller, uint64_t call);

  // See Note [Passes of a context].

  /// On the initiator. Throws `invalid` if one is under way.
  void begin_pass(std::shared_ptr<Pass> pass);
  /// On the initiator: all ranks are done.
  void finish_pass(uint64_t id);
  /// Elsewhere: gives back the pass `id`, made by `make` if it is not there. Throws `cancelled` if
  /// there has been a newer one or it has failed.
  std::shared_ptr<Pass> pass_or(uint64_t id, const std::function<std::shared_ptr<Pass>()>& make);
  /// A pass fails with all that it has here; hooks are destroyed, a guard is told why. False if it
  /// is over, or was told before: nothing happens. Not on the loop.
  bool fail_pass(uint64_t id, const base::Error& error);
  /// The same in two parts, the first of which may be run on the loop.
  struct Failing;
  std::optional<Failing> begin_failing(uint64_t id);

  /// Gradients come under the current stream of their device, and those given out are ready there.
  /// Takes a gradient over, or copies a shared one: leaves do not share gradients.
  /// False if `pass` is not 0 and no longer runs here: no later pass gets its gradient.
  bool accumulate(const at::Tensor& variable, at::Tensor gradient, uint64_t pass = 0);
  at::Tensor gradient(const at::Tensor& variable) const;
  void set_gradient(const at::Tensor& variable, at::Tensor gradient);
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;
  /// Leaves none.
  std::vector<std::pair<at::Tensor, at::Tensor>> take_gradients();

  void on_gradient_ready(const at::Tensor& variable, ReadyHook fn);
  /// False if `pass` is not 0 and does not run here.
  bool on_pass_end(std::function<void()> fn, uint64_t pass = 0);
  bool runs(uint64_t pass) const {
    std::lock_guard lock(mutex_);
    return runs_locked(pass);
  }
  void set_guard(PassGuard guard);
  /// Asked before gradients from another rank enter a pass; null: they need not wait.
  std::function<base::Future<void>()> admission() const;
  std::vector<ReadyHook> take_ready_hooks(uint64_t pass, const at::Tensor& variable);
  /// This rank's part of the pass has run.
  std::vector<std::function<void()>> end_hooks_of(uint64_t pass);

 private:
  enum class PassState : uint8_t { kOver, kRunning, kRan, kFailed };
  enum class PassEvent : uint8_t { kBegin, kBeginByGradients, kRun, kFinish, kFail };
  /// False if the event is nothing to this rank.
  bool transition_locked(PassEvent event, uint64_t id);
  struct Hooks {
    std::unordered_map<const c10::TensorImpl*, std::vector<ReadyHook>> ready;
    std::vector<std::function<void()>> end;
    PassGuard guard;
  };
  struct Entry {
    at::Tensor variable;
    at::Tensor gradient;
    std::optional<c10::Stream> made;  // the stream that has been given the making of the gradient
    mutable bool followed = false;    // another one may still be reading it
  };
  static const at::Tensor& read(const Entry& entry);
  bool runs_locked(uint64_t pass) const {
    return pass == newest_ && pass_state_ == PassState::kRunning;
  }

  const uint64_t id_;
  mutable std::mutex mutex_;
  std::set<int> participants_;  // ranks that this one sent a message of the context to
  std::unordered_map<uint64_t, std::shared_ptr<SendNode>> sends_;
  std::set<std::pair<int, uint64_t>> given_up_;  // calls to this one: the caller and its number
  std::unordered_map<const c10::TensorImpl*, Entry> gradients_;
  Hooks hooks_;
  std::shared_ptr<Pass> pass_;  // the newest; null: it never began here, or all ranks are done
  uint64_t newest_ = 0;         // its number
  PassState pass_state_ = PassState::kOver;
};

/// What a pass that has failed leaves to be ended.
struct ContextState::Failing {
  /// Not on the loop.
  void end(const base::Error& error);

  std::shared_ptr<Pass> pass;
  Hooks hooks;
};

}  // namespace distrain::autograd
