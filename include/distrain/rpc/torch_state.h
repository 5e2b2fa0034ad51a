#pragma once

#include <ATen/ThreadLocalState.h>

namespace distrain::rpc {

/// What LibTorch keeps for a thread and what user code may leave changed on it: grad mode,
/// inference mode, autocast, dispatch keys, hooks of saved tensors, the number of intra-op threads.
/// Threads that run code of several users restore the state after each of them. Comparing takes
/// about as long as a function call of torch's; only a state that was changed is written, which
/// takes longer.
class TorchState {
 public:
  /// The current state of this thread.
  TorchState();
  /// Sets the state of this thread, which must be the one that this object was made on.
  void restore() const;

 private:
  /// The part that C++ code can change.
  struct Flags {
    Flags();
    friend bool operator==(const Flags&, const Flags&) = default;

    uint64_t included, excluded;  // dispatch keys
    bool grad, forward_grad, inference, multithreading, autocast_cache, saved_tensor_hooks;
    c10::ScalarType autocast_cpu, autocast_accelerator;
    int threads;
  };

  const Flags flags_;
  const at::ThreadLocalState state_;
};

/// Restores the state of this thread at the end of a scope in which user code runs.
class TorchStateGuard {
 public:
  TorchStateGuard() = default;
  ~TorchStateGuard() { before_.restore(); }
  TorchStateGuard(const TorchStateGuard&) = delete;
  TorchStateGuard& operator=(const TorchStateGuard&) = delete;

 private:
  const TorchState before_;
};

}  // namespace distrain::rpc
