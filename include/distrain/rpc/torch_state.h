#pragma once

#include <ATen/ThreadLocalState.h>

namespace distrain::rpc {

/// A copy of the current thread's LibTorch state, as far as user code can change it: grad mode,
/// inference mode, autocast, dispatch keys, saved-tensor hooks, number of intra-op threads.
/// Restoring it writes only what has changed, because comparing is faster than writing.
class TorchState {
 public:
  /// Restores the state. Must be called on the thread that created this object.
  void restore() const;

 private:
  /// The part of the state that C++ code can change.
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
