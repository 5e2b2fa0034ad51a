#pragma once

#include <ATen/ThreadLocalState.h>

namespace distrain::rpc {

/// A copy of the current thread's LibTorch state that user code can change: grad mode, inference
/// mode, autocast, dispatch keys, hooks of saved tensors, the number of intra-op threads. Restoring
/// writes only a state that has changed, because comparing takes less time than writing.
class TorchState {
 public:
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
struct TorchStateGuard : TorchState {
  ~TorchStateGuard() { restore(); }
};

}  // namespace distrain::rpc
