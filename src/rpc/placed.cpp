#include "distrain/rpc/placed.h"

#include "distrain/base/thread_state.h"
#include "distrain/rpc/device.h"

namespace distrain::rpc {

at::Tensor placed(const at::Tensor& tensor, c10::Device device) {
  if (tensor.device() == device) return tensor;
  if (is_accelerator(device)) return tensor.to(device, /*non_blocking=*/tensor.is_cpu());
  const base::BlockingScope waits;  // for the device
  return tensor.to(device);
}

at::Tensor for_rank(const Agent& agent, int rank, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const bool arrives_on_cpu = agent.device_of(rank) == c10::Device(c10::kCPU).str();
  return placed(tensor, arrives_on_cpu ? c10::Device(c10::kCPU) : agent.device());
}

}  // namespace distrain::rpc
