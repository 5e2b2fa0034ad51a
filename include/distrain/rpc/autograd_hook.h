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

/// Returns the id of this thread's current distributed autograd context; 0 if there is none.
uint64_t current_context();
/// Returns the hook of the current context's agent; null if none. Valid while the agent lives.
AutogradHook* current_autograd();

/// Makes an autograd context current on this thread until destroyed. Must not outlive the agent.
class ContextScope {
 public:
  ContextScope(const Agent& agent, uint64_t context);
  /// When any thread sets `ended`, the context of the enclosing scope becomes current here again.
  ContextScope(AutogradHook* autograd, uint64_t context,
               std::shared_ptr<const std::atomic<bool>> ended = nullptr);
  /// Makes `context` current and keeps the current autograd hook. 0 means no context.
  explicit ContextScope(uint64_t context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  /// Returns true if this thread is in this scope and in no scope opened later.
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

/// The interface through which the rpc layer calls distributed autograd when it sends and receives
/// messages. Tensors that require a gradient are inputs of a send node on the sender and outputs of
/// a receive node on the receiver. Thread-safe; not called on the loop unless stated otherwise.
class AutogradHook {
 public:
  virtual ~AutogradHook() = default;
  /// Called before a message of `context` is sent to rank `to`. If the message is a reply,
  /// `answered` is the id of the call by `to` that it answers; if it is a call, `answered` is 0.
  /// Records a send node for the tensors that require a gradient and returns its id (0 if none do).
  virtual uint64_t on_send(uint64_t context, int to, uint64_t answered,
                           const std::vector<at::Tensor>& tensors) = 0;
  /// Called if a message was not sent or its call has failed, so no gradient will arrive for its
  /// send node `autograd_id` (0 if it has none). May be called on the loop.
  virtual void on_failed(uint64_t context, uint64_t autograd_id) = 0;
  /// Called if this rank no longer waits for the reply to its call `call` to rank `to`. If the
  /// reply still arrives, this rank sends no gradient for its tensors. May be called on the loop.
  virtual void on_given_up(uint64_t context, int to, uint64_t call) = 0;
  /// Records a receive node, whose outputs are the tensors of `message` that require a gradient.
  /// `function` is the function that returned the tensors; empty if they are arguments.
  virtual void on_receive(uint64_t context, InMessage& message, const std::string& function) = 0;
  /// Returns a tensor that shares the memory of `parameter`. While the returned tensor is alive, no
  /// update writes to that memory, except sparse updates of single rows.
  virtual at::Tensor hold(const at::Tensor& parameter) = 0;
  /// Returns the number of autograd contexts for which this rank holds state.
  virtual size_t live_contexts() const = 0;
  /// Returns the number of backward passes that have work left on this rank.
  virtual size_t live_passes() const = 0;
};

}  // namespace distrain::rpc
