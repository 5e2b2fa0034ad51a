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
/// Returns the hook of the current context's agent; null if unknown. Valid while the agent lives.
AutogradHook* current_autograd();

/// A scope in which an autograd context is current on this thread. Must not outlive the agent.
class ContextScope {
 public:
  ContextScope(const Agent& agent, uint64_t context);
  /// When any thread sets `ended`, the enclosing scope's context becomes current again.
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
/// messages. Thread-safe; not called on the loop unless stated otherwise.
class AutogradHook {
 public:
  virtual ~AutogradHook() = default;
  /// Called before a message of `context` is sent to rank `to`. The message is the reply to that
  /// rank's call `answered` or, if `answered` is 0, a call. Records a send node for the tensors
  /// that require a gradient and returns its id; returns 0 if no tensor requires a gradient.
  virtual uint64_t on_send(uint64_t context, int to, uint64_t answered,
                           const std::vector<at::Tensor>& tensors) = 0;
  /// Called if a message was not sent or its call has failed, so no gradient will arrive for the
  /// send node `autograd_id` (0: the message has none). May be called on the loop.
  virtual void on_failed(uint64_t context, uint64_t autograd_id) = 0;
  /// Called if this rank no longer waits for the reply to its call `call` to rank `to`. If the
  /// reply still arrives, this rank sends no gradient for its tensors. May be called on the loop.
  virtual void on_given_up(uint64_t context, int to, uint64_t call) = 0;
  /// Records a receive node. Its outputs are the tensors of `message` that require a gradient.
  /// `function` is the function that returned the tensors; empty if they are arguments.
  virtual void on_receive(uint64_t context, InMessage& message, const std::string& function) = 0;
  /// Returns a tensor that shares the memory of `parameter`. While the returned tensor is alive, no
  /// update writes to that memory, except sparse updates of single rows.
  virtual at::Tensor hold(const at::Tensor& parameter) = 0;
  /// Returns the number of autograd contexts for which this rank holds state.
  virtual size_t live_contexts() const = 0;
};

}  // namespace distrain::rpc
