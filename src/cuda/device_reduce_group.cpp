#include "distrain/cuda/device_reduce_group.h"

#include <algorithm>
#include <set>

#include <ATen/Functions.h>

#include "distrain/collective/staged_reduce_group.h"
#include "distrain/cuda/load.h"
#include "distrain/cuda/nccl_reduce_group.h"
#include "distrain/rpc/device.h"

namespace distrain::cuda {

namespace {

constexpr int64_t kIdBytes = 64;  // of a GPU's id, truncated or padded

/// Returns true if each rank has its own GPU, because NCCL refuses two ranks on one GPU.
bool each_has_a_gpu(rpc::Agent& agent, collective::Backend& backend) {
  std::vector<at::Tensor> ids;
  for (int rank = 0; rank < backend.getSize(); ++rank) {
    const std::string device = agent.device_of(backend.world_rank(rank));
    if (!c10::Device(device).is_cuda()) return false;
    ids.push_back(at::zeros({kIdBytes}, at::kByte));
  }
  const std::string id = load().device_id(agent.device().index());
  const at::Tensor own = at::zeros({kIdBytes}, at::kByte);
  std::copy_n(id.begin(), std::min<size_t>(id.size(), kIdBytes), own.data_ptr<uint8_t>());
  backend.allgather(own, ids).wait();
  std::set<std::vector<uint8_t>> apart;
  for (const at::Tensor& each : ids) {
    const auto* const bytes = each.const_data_ptr<uint8_t>();
    apart.emplace(bytes, bytes + kIdBytes);
  }
  return apart.size() == ids.size();
}

}  // namespace

DeviceReduceGroup make_reduce_group(rpc::Agent& agent,
                                    const c10::intrusive_ptr<collective::Backend>& backend) {
  if (each_has_a_gpu(agent, *backend)) {
    return {make_nccl_reduce_group(backend, load()), "nccl"};
  }
  return {std::make_shared<collective::StagedReduceGroup>(backend),
          rpc::is_accelerator(agent.device()) ? "staged" : ""};
}

}  // namespace distrain::cuda
