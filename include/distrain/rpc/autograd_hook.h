#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace distrain::rpc {

class Agent;
class AutogradHook;
struct InMessage;

/// Returns the distributed autograd context of this thread's calls, or 0 if there is none.
uint64_t current_context();
/// Returns the autograd hook of that context's agent; null if unknown. Valid while the agent lives.
AutogradHook* current_autograd();

/// Sets the current context while the object lives. Must not outlive its agent.
class ContextScope {
 public:
  ContextScope(const Agent& agent, uint64_t context);
  /// After any thread has set `ended`, the enclosing scope is current instead of this one.
  ContextScope(AutogradHook* autograd, uint64_t context,
               std::shared_ptr<const std::atomic<bool>> ended = nullptr);
  /// Sets `context` with the current autograd hook; 0 means no context.
  explicit ContextScope(uint64_t context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  /// Returns true if this thread has opened no other scope inside this one.
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

/// Distributed autograd's part in sending and receiving messages. The rpc layer knows autograd only
/// through this interface. Thread-safe; called off the loop unless stated otherwise.
class AutogradHook {
 public:
  virtual ~AutogradHook() = default;
  /// Called before a message of `context` is sent to rank `to`: the reply to its call `answered`,
  /// or a call if that is 0. Records a send node for tensors that require a gradient and returns
  /// its id, or 0 if none does.
  virtual uint64_t on_send(uint64_t context, int to, uint64_t answered,
                           const std::vector<at::Tensor>& tensors) = 0;
  /// Called if a message was not sent or its call has failed: no gradient will arrive for the node
  /// `autograd_id` (0: the message has none). May be called on the loop.
  virtual void on_failed(uint64_t context, uint64_t autograd_id) = 0;
  /// Called if this rank no longer waits for the reply to its call `call` to rank `to`: if a reply
  /// still arrives, this rank sends no gradient for it. May be called on the loop.
  virtual void on_given_up(uint64_t context, int to, uint64_t call) = 0;
  /// Counterpart of on_send(): makes the tensors of `message` that require a gradient outputs of a
  /// receive node. `function` is the function that returned the tensors; empty for arguments.
  virtual void on_receive(uint64_t context, InMessage& message, const std::string& function) = 0;
  /// Returns a tensor with the current value of `parameter`, in the same memory. While the result
  /// is alive, no update writes to that memory, except sparse updates of single rows.
  virtual at::Tensor hold(const at::Tensor& parameter) = 0;
  /// Returns the number of contexts of which this rank still holds state.
  virtual size_t live_contexts() const = 0;
};

}  // namespace distrain::rpc
