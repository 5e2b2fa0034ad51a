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

#include "distrain/rpc/agent.h"

namespace distrain::autograd {

class ContextState;
class Runtime;

/// Gives `agent` distributed autograd. Once, before join(), on every rank of the job.
void install(rpc::Agent& agent);

/// One distributed forward pass and its backward passes (with retain_graph gradients add up).
///
/// While it lives it is the current context of the thread that made it, unless a newer one is: each
/// call made there, and each nested call of its handlers, records a pair of send and receive nodes
/// for tensors that require a gradient. A call under a NoGradGuard or InferenceMode is outside of
/// it, with all that its handler calls. Contexts may end in any order, but those that were made
/// within an rpc::ContextScope end within it. Gradients are kept here, by variable, never in
/// `.grad`: concurrent contexts on one module are independent. Its end releases it on all ranks.
class Context {
 public:
  /// kExplicit: not the thread's current context: calls belong to it where an rpc::ContextScope of
  /// its id says so. For several passes at a time, such as one for each micro-batch.
  enum class Scope { kThread, kExplicit };
  explicit Context(rpc::Agent& agent, Scope scope = Scope::kThread);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  uint64_t id() const { return id_; }

  /// Variable and gradient, for the leaves on this rank that the passes have reached.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;
  /// Undefined when there is none.
  at::Tensor gradient(const at::Tensor& variable) const;
  /// In place of what the passes have for `variable`.
  void set_gradient(const at::Tensor& variable, at::Tensor gradient);

  /// For the next pass: `fn` is called once with this rank's final gradient of `variable`, on the
  /// thread that computed it, while the rest of the pass goes on; not at all if there is none.
  void on_gradient_ready(const at::Tensor& variable, std::function<void(const at::Tensor&)> fn);
  /// For the next pass: `fn` is called once when this rank's part of the graph has run; it may
  /// block, and backward() returns after it and throws what it throws. Failed passes drop it.
  void on_pass_end(std::function<void()> fn);

  const std::shared_ptr<ContextState>& state() const { return state_; }
  rpc::Agent& agent() const { return agent_; }

 private:
  rpc::Agent& agent_;
  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<ContextState> state_;
  const uint64_t id_;
  const std::shared_ptr<std::atomic<bool>> ended_;  // for the thread that made it; null: explicit
};

/// A context on this rank, for code that is not given the Context, or may outlive it. A weak
/// reference: what it does to a context that has ended is lost. Thread-safe.
class ContextRef {
 public:
  /// `pass`: the number of a pass over the context; 0: of none.
  explicit ContextRef(const std::shared_ptr<ContextState>& state, uint64_t pass = 0);

  /// The current one of this thread; nothing where there is none. Throws `invalid` for one that has
  /// ended, and where the thread knows its number but not its agent (see rpc::ContextScope).
  static std::optional<ContextRef> current();

  uint64_t id() const { return id_; }
  /// Returns the number of the pass that gave a LeafHook this reference, else 0.
  uint64_t pass() const { return pass_; }
  bool ended() const { return state_.expired(); }
  /// Returns true if this rank's part of that pass runs: it has not failed, and none is newer.
  bool runs() const;
  /// As Context's.
  void set_gradient(const at::Tensor& variable, at::Tensor gradient) const;
  /// As Context's. Returns false, and drops `fn`, if the context or this reference's pass has
  /// ended.
  bool on_pass_end(std::function<void()> fn) const;

 private:
  uint64_t id_;
  uint64_t pass_;
  std::weak_ptr<ContextState> state_;
};

struct PassOptions {
  bool retain_graph = false;
  /// For a message with gradients until all that follows is done. max(): while its peer lives.
  std::chrono::nanoseconds timeout = rpc::kAgentsTimeout;
};

/// Computes the gradients of the sum of `roots` (scalars, or any shape with a gradient of ones)
/// with respect to all leaves that took part, on all ranks, and leaves them in the context of each
/// rank. Returns when all ranks are done; throws what went wrong on any of them. One pass over a
/// context at a time: a second one beside it is `invalid`.
///
/// FAST mode, as PyTorch calls it (pytorch.org, "Distributed Autograd Design"): every tensor that a
/// call of this context sent or returned and that requires a gradient has to reach the roots. If
/// one does not, `invalid` names a rank that waited for its gradient. A call that has failed counts
/// for nothing; one that its own handler made, and that did not fail, still counts.
void backward(Context& context, const std::vector<at::Tensor>& roots, PassOptions options = {});
/// Runs the first part on the caller's thread and waits for no rank. The context outlives the pass.
base::Future<void> backward_async(Context& context, const std::vector<at::Tensor>& roots,
                                  PassOptions options = {});

/// Fails the pass over a context that is under way or, if there is none, the next one, on all ranks
/// that have a part in it: their guards are told.
void fail_passes(const Context& context, const base::Error& error);

/// The gradient that context `id` has for `variable` on the rank of `agent`; undefined if none.
/// For handlers that are told a context's id, such as an optimizer's.
at::Tensor gradient(rpc::Agent& agent, uint64_t id, const at::Tensor& variable);

/// Adds what context `from` has gathered on the rank of `agent` to context `to`; `from` has nothing
/// there then. So the contexts of many micro-batches keep one set of gradients.
void move_gradients(rpc::Agent& agent, uint64_t from, uint64_t to);

/// How the next pass over a context goes on one rank.
struct PassGuard {
  /// Asked when gradients come from another rank: they wait until the future is done.
  std::function<base::Future<void>()> admit;
  /// As Context::on_pass_end.
  std::function<void()> on_end;
  /// In place of on_end, with the reason.
  std::function<void(const base::Error&)> on_failure;
};

/// For handlers: of the current context, which must be one. All three functions are kept until the
/// pass has ended here or the context has. That may be after its initiator heard of a failure, and
/// so after the last RRef to the handler's object is gone: they hold what they use.
void guard_pass(rpc::Agent& agent, PassGuard guard);

}  // namespace distrain::autograd
