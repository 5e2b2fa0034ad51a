#include "distrain/rpc/to_device.h"

#include <ATen/Functions.h>

#include "distrain/base/thread_state.h"
#include "distrain/rpc/device.h"

namespace distrain::rpc {

at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  if (tensor.device() == device) return tensor;
  if (is_accelerator(device)) return tensor.to(device, /*non_blocking=*/tensor.is_cpu());
  const base::BlockingScope waits;  // for the copy to complete
  return tensor.to(device);
}

void check_rows(const at::Tensor& index, const at::Tensor& table) {
  if (is_accelerator(table.device())) expect_rows(index, table);
}

void expect_rows(const at::Tensor& index, const at::Tensor& table) {
  if (index.numel() == 0 || !at::isIntegralType(index.scalar_type(), false)) return;
  const auto [least, most] = at::aminmax(to_device(index, c10::kCPU));
  const auto low = least.item<int64_t>(), high = most.item<int64_t>();
  TORCH_CHECK_INDEX(low >= 0 && high < table.size(0), "index ", low < 0 ? low : high,
                    " is out of range, the table has ", table.size(0), " rows");
}

at::Tensor for_rank(const Agent& agent, int rank, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const bool arrives_on_cpu = agent.device_of(rank) == c10::Device(c10::kCPU).str();
  return to_device(tensor, arrives_on_cpu ? c10::Device(c10::kCPU) : agent.device());
}

}  // namespace distrain::rpc
