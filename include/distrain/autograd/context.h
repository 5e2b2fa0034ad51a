#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include "distrain/rpc/agent.h"

namespace distrain::autograd {

class ContextState;
class Runtime;

/// Adds distributed autograd to `agent`. Call it once on every rank of the job, before join().
void install(rpc::Agent& agent);

/// A weak reference to a context on this rank, for code that has no Context or may outlive it.
/// Calls on a context that has ended do nothing. Thread-safe.
class ContextRef {
 public:
  /// `pass` is the number of the backward pass that creates the reference for a LeafHook, else 0.
  explicit ContextRef(const std::shared_ptr<ContextState>& state, uint64_t pass = 0);

  /// Returns this thread's current context, if any. Throws `invalid` if the context has ended or
  /// its agent is unknown (see rpc::ContextScope), or the rank-loss error if its creator is lost.
  static std::optional<ContextRef> current();

  uint64_t id() const { return id_; }
  /// Returns the number of the backward pass that gave this reference to a LeafHook, else 0.
  uint64_t pass() const { return pass_; }
  bool ended() const { return state_.expired(); }
  /// Returns true while this rank runs its part of the backward pass whose number is pass().
  bool runs() const;
  /// Returns this rank's gradient of `variable`, or an undefined tensor if there is none.
  at::Tensor gradient(const at::Tensor& variable) const;
  void set_gradient(const at::Tensor& variable, at::Tensor gradient) const;
  /// Registers `fn` for the next pass, which calls `fn` once when this rank's part of the graph has
  /// run, unless the pass fails. `fn` may block; backward() waits for `fn` and throws its error.
  /// Returns false if the context or pass() has ended.
  bool on_pass_end(std::function<void()> fn) const;

 private:
  uint64_t id_;
  uint64_t pass_;
  std::weak_ptr<ContextState> state_;
};

/// One distributed forward pass and its backward passes (with retain_graph their gradients add up).
///
/// The newest live context that a thread has created is the thread's current context. Calls of the
/// thread and their nested calls record send and receive nodes for tensors that require a gradient,
/// except under a NoGradGuard or InferenceMode. Contexts may end in any order, but a context
/// created within an rpc::ContextScope must end within that scope. A context keeps its gradients
/// and never writes `.grad`, so concurrent contexts on one module are independent. The destructor
/// releases the context on all ranks.
class Context : public ContextRef {
 public:
  /// A kExplicit context becomes the thread's current context only within an rpc::ContextScope with
  /// its id. Use it for concurrent passes, such as micro-batches.
  enum class Scope { kThread, kExplicit };
  explicit Context(rpc::Agent& agent, Scope scope = Scope::kThread);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Returns the pair (variable, gradient) for each leaf on this rank that a pass has reached.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;

  /// Registers `fn` for the next pass. The pass calls `fn` once with this rank's final gradient of
  /// `variable`, on the thread that computed the gradient, unless there is no gradient.
  void on_gradient_ready(const at::Tensor& variable, std::function<void(const at::Tensor&)> fn);

  const std::shared_ptr<ContextState>& state() const { return state_; }
  rpc::Agent& agent() const { return agent_; }

 private:
  Context(rpc::Agent& agent, Scope scope, std::shared_ptr<ContextState> state);

  rpc::Agent& agent_;
  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<ContextState> state_;
  const std::shared_ptr<std::atomic<bool>> ended_;  // shared with the thread's stack of contexts
};

/// A post-accumulate hook of a leaf. Torch's own backward() calls operator(). A pass over a
/// context, which does not run AccumulateGrad, calls on_context_gradient() instead, and fails if a
/// leaf has a post-accumulate hook of another type and no on_gradient_ready() hook.
class LeafHook : public torch::autograd::PostAccumulateGradHook {
 public:
  /// Called once per pass with this rank's final gradient, on the thread that computed it, after
  /// the hooks of on_gradient_ready. An exception fails the pass. Once the pass has failed,
  /// `context.runs()` returns false.
  virtual void on_context_gradient(const ContextRef& context, const at::Tensor& gradient) = 0;
};

struct PassOptions {
  bool retain_graph = false;
  /// Time limit for each message with gradients and all work that follows from the message. With
  /// max(), a sender waits until the receiver replies or is lost.
  std::chrono::nanoseconds timeout = rpc::kAgentsTimeout;
};

/// Computes the gradients of the sum of all elements of `roots` with respect to all leaves on all
/// ranks, and stores them in the context on each rank. Returns when all ranks are done. Throws the
/// error of any rank, and `invalid` if another pass over `context` is in flight.
///
/// Implements the FAST mode of PyTorch ("Distributed Autograd Design"): the roots must depend on
/// each tensor that requires a gradient and that a call of this context sent or returned. Otherwise
/// backward() throws `invalid`, naming a rank that waited for a gradient. Tensors of failed calls
/// are exempt, but not tensors of successful nested calls that the handler of a failed call made.
/// Throws `invalid` if this rank has not created context `id`, or if the context has ended.
void backward(rpc::Agent& agent, uint64_t id, const std::vector<at::Tensor>& roots,
              PassOptions options = {});
inline void backward(Context& context, const std::vector<at::Tensor>& roots,
                     PassOptions options = {}) {
  backward(context.agent(), context.id(), roots, options);
}
/// The root is the value of `root`: on its owner the value itself, on another rank a copy, which
/// the first pass of the context fetches and later passes use again.
void backward(Context& context, const rpc::RRef<at::Tensor>& root, PassOptions options = {});
/// Starts a pass and returns without waiting for other ranks; graph nodes that need no gradient of
/// another rank run on the caller's thread. `context` must outlive the pass.
base::Future<void> backward_async(Context& context, const std::vector<at::Tensor>& roots,
                                  PassOptions options = {});

/// Fails the in-flight pass over `context` on all ranks that have a part of the context. Each of
/// these ranks drops its hooks for the context and calls `on_failure` of its PassGuard.
void fail_passes(const Context& context, const base::Error& error);

/// Returns the gradient of `variable` in context `id` on the rank of `agent`, or an undefined
/// tensor if there is none. Use it in remote functions that receive a context's id.
at::Tensor gradient(rpc::Agent& agent, uint64_t id, const at::Tensor& variable);

/// Adds the gradients of context `from` to those of `to` on the rank of `agent`, moves the
/// attachments, and clears `from`, so that micro-batches share one set of gradients. Throws
/// `invalid` if `to` is unknown.
void move_gradients(rpc::Agent& agent, uint64_t from, uint64_t to);

/// Keeps `object` on the rank of `agent` until context `id` ends there. Its destructor may run on
/// the thread that notifies layers of lost ranks, so it must not block. Throws `invalid` if the
/// context has ended.
void attach(rpc::Agent& agent, uint64_t id, const void* owner, std::shared_ptr<void> object);
/// Returns the objects that `owner` has attached to context `id` on the rank of `agent`, in order.
std::vector<std::shared_ptr<void>> attachments(rpc::Agent& agent, uint64_t id, const void* owner);
/// Returns true if a pass over context `id` has failed on the rank of `agent`. The gradients may
/// then lack some of that pass, and later passes add to these gradients.
bool pass_failed(rpc::Agent& agent, uint64_t id);

/// Callbacks of one rank for the next pass over a context.
struct PassGuard {
  /// Called when another rank's gradients arrive, which the pass uses once the future is done.
  std::function<base::Future<void>()> admit;
  /// Called when this rank's part of the pass has run, after all Context::on_pass_end hooks.
  std::function<void()> on_end;
  /// Called if the pass fails, or `on_end` throws.
  std::function<void(const base::Error&)> on_failure;
};

/// Sets the guard of the current context. Throws `invalid` if there is no current context. The
/// guard's functions must own the objects that they use, because the guard is kept until the pass
/// or the context ends on this rank, and the last RRef to these objects may be gone by then.
void guard_pass(rpc::Agent& agent, PassGuard guard);

}  // namespace distrain::autograd
