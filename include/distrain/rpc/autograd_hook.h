#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace distrain::rpc {

class Agent;
class AutogradHook;

/// The distributed autograd context that calls of this thread belong to; 0: none.
uint64_t current_context();
/// The autograd of that context's agent; null: not known. Valid while the agent lives.
AutogradHook* current_autograd();

/// Sets the current context while the object lives, not longer than its agent.
class ContextScope {
 public:
  ContextScope(const Agent& agent, uint64_t context);
  /// Once any thread sets `ended`, the scope around this one counts in its place.
  ContextScope(AutogradHook* autograd, uint64_t context,
               std::shared_ptr<const std::atomic<bool>> ended = nullptr);
  /// 0 leaves all contexts. Another one is taken to be of the agent of the current one.
  explicit ContextScope(uint64_t context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  /// Returns true if no other scope has been opened on this thread within this one.
  bool is_innermost() const;

 private:
  friend uint64_t current_context();
  friend AutogradHook* current_autograd();
  static const ContextScope* current();

  const ContextScope* const outer_;
  AutogradHook* const autograd_;
  const uint64_t context_;
  const std::shared_ptr<const std::atomic<bool>> ended_;
};

/// What distributed autograd does to the messages of a context. The rpc layer calls it and knows
/// nothing else of autograd. Thread-safe; called off the loop unless stated.
class AutogradHook {
 public:
  virtual ~AutogradHook() = default;

  /// A message of `context` is about to go to rank `to`: the answer to its call `answered`, or a
  /// call (0). Records a send node for those tensors that require a gradient and returns its id; 0
  /// when there is none.
  virtual uint64_t on_send(uint64_t context, int to, uint64_t answered,
                           const std::vector<at::Tensor>& tensors) = 0;
  /// A message has come to nothing: it was not sent, or its call has failed. No gradient comes for
  /// the node `autograd_id`; 0: it has none. The loop, too.
  virtual void on_failed(uint64_t context, uint64_t autograd_id) = 0;
  /// This rank does not wait for the answer of its call `call` to rank `to` any more: if one comes
  /// yet, no gradient will come for it. The loop, too.
  virtual void on_given_up(uint64_t context, int to, uint64_t call) = 0;

  /// The pair of on_send: makes the tensors marked in `requires_grad` outputs of a receive node.
  virtual void on_receive(uint64_t context, uint64_t autograd_id, int from,
                          std::vector<at::Tensor>& tensors,
                          const std::vector<bool>& requires_grad) = 0;

  /// A parameter as it is now, in the same memory, which no update writes to while this is held,
  /// but for those of single rows (sparse gradients).
  virtual at::Tensor hold(const at::Tensor& parameter) = 0;

  /// Contexts that this rank still holds something of.
  virtual size_t live_contexts() const = 0;
};

}  // namespace distrain::rpc
