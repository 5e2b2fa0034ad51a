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

/// What one rank holds of a context. Thread-safe.
class ContextState {
 public:
  using ReadyHook = std::function<void(const at::Tensor&)>;

  explicit ContextState(uint64_t id) : id_(id) {}

  uint64_t id() const { return id_; }

  void add_participant(int rank);
  std::set<int> participants() const;

  void add_send(uint64_t autograd_id, std::shared_ptr<SendNode> node);
  std::shared_ptr<SendNode> send(uint64_t autograd_id) const;
  std::vector<std::shared_ptr<SendNode>> sends() const;

  /// The pass under way. A new one takes the place of one that is over.
  std::shared_ptr<Pass> pass(uint64_t id) const;
  void set_pass(std::shared_ptr<Pass> pass);
  /// Forgets the pass `id`, unless a newer one has taken its place.
  /// Gives it back, null if it never was here; nothing if it was over before.
  std::optional<std::shared_ptr<Pass>> end_pass(uint64_t id);
  /// Gives back the pass `id`, made by `make` if it is not there. Throws `cancelled` if there has
  /// been a newer one or it has ended: what is late for a failed pass must not disturb the next.
  std::shared_ptr<Pass> pass_or(uint64_t id, const std::function<std::shared_ptr<Pass>()>& make);

  /// Gradients come under the current stream of their device, and those given out are ready there.
  /// Takes a gradient over, or a copy where somebody else has it, too: what is done to one leaf's
  /// gradient is not done to another's.
  void accumulate(const at::Tensor& variable, at::Tensor gradient);
  at::Tensor gradient(const at::Tensor& variable) const;
  void set_gradient(const at::Tensor& variable, at::Tensor gradient);
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;
  /// Leaves none.
  std::vector<std::pair<at::Tensor, at::Tensor>> take_gradients();

  void on_gradient_ready(const at::Tensor& variable, ReadyHook fn);
  void on_pass_end(std::function<void()> fn);
  void set_guard(PassGuard guard);
  /// Asked before gradients from another rank enter a pass; null: they need not wait.
  std::function<base::Future<void>()> admission() const;
  std::vector<ReadyHook> take_ready_hooks(const at::Tensor& variable);
  std::vector<std::function<void()>> take_end_hooks();
  /// Destroys all hooks; tells a guard why.
  void fail_hooks(const base::Error& error);

 private:
  struct Entry {
    at::Tensor variable;
    at::Tensor gradient;
    std::optional<c10::Stream> made;  // the stream that has been given the making of the gradient
    mutable bool followed = false;    // another one may still be reading it
  };
  static const at::Tensor& read(const Entry& entry);

  const uint64_t id_;
  mutable std::mutex mutex_;
  std::set<int> participants_;  // ranks that this one sent a message of the context to
  std::unordered_map<uint64_t, std::shared_ptr<SendNode>> sends_;
  std::unordered_map<const c10::TensorImpl*, Entry> gradients_;
  std::unordered_map<const c10::TensorImpl*, std::vector<ReadyHook>> ready_hooks_;
  std::vector<std::function<void()>> end_hooks_;
  PassGuard guard_;
  std::shared_ptr<Pass> pass_;
  uint64_t ended_pass_ = 0;  // all up to this one: a context's passes are numbered upwards
};

}  // namespace distrain::autograd
