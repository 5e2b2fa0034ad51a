#include "distrain/rpc/torch_state.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>

namespace distrain::rpc {

TorchState::Flags::Flags() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  included = keys.included_.raw_repr();
  excluded = keys.excluded_.raw_repr();
  const c10::AutogradState& modes = c10::AutogradState::get_tls_state();
  grad = modes.get_grad_mode();
  forward_grad = modes.get_fw_grad_mode();
  inference = modes.get_inference_mode();
  multithreading = modes.get_multithreading_enabled();
  autocast_cache = at::autocast::is_autocast_cache_enabled();
  saved_tensor_hooks = at::SavedTensorDefaultHooks::is_enabled();
  autocast_cpu = at::autocast::get_autocast_dtype(at::kCPU);
  autocast_accelerator = at::autocast::get_autocast_dtype(at::kCUDA);
  threads = at::get_num_threads();
}

void TorchState::restore() const {
  const Flags now;
  if (now == flags_) return;
  at::ThreadLocalState::setThreadLocalState(state_);
  at::autocast::set_autocast_cache_enabled(flags_.autocast_cache);
  if (now.threads != flags_.threads) at::set_num_threads(flags_.threads);
}

}  // namespace distrain::rpc
