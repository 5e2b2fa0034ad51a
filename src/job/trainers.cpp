#include "distrain/job/trainers.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/collective/staged_reduce_group.h"
#include "distrain/cuda/load.h"
#include "distrain/cuda/nccl_reduce_group.h"
#include "distrain/rpc/device.h"

namespace distrain::job {

namespace {

constexpr uint16_t kCollectiveChannel = 2;
constexpr int64_t kIdBytes = 64;  // of a GPU's id, cut off or filled up

/// Whether NCCL can reduce: it refuses two ranks on one GPU. Collective, with the same answer on
/// all ranks of the group.
bool each_has_a_gpu(rpc::Agent& agent, collective::Backend& backend) {
  std::vector<at::Tensor> ids;
  for (int rank = 0; rank < backend.getSize(); ++rank) {
    const std::string device = agent.device_of(backend.world_rank(rank));
    if (!c10::Device(device).is_cuda()) return false;
    ids.push_back(at::zeros({kIdBytes}, at::kByte));
  }
  const std::string id = cuda::load().device_id(agent.device().index());
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

optim::Sharing sharing_by_mode(const std::string& mode, int trainers, int participant,
                               int64_t staleness) {
  using Mode = optim::Sharing::Mode;
  optim::Sharing sharing;
  sharing.mode = mode == "sync" ? Mode::kSync : mode == "ssp" ? Mode::kSsp : Mode::kAsync;
  sharing.participants = trainers;
  sharing.participant = participant;
  sharing.staleness = staleness;
  return sharing;
}

c10::intrusive_ptr<collective::Backend> trainers_backend(rpc::Agent& agent, int first, int trainers,
                                                         const Job& job) {
  std::vector<int> ranks(static_cast<size_t>(trainers));
  std::iota(ranks.begin(), ranks.end(), first);
  collective::Backend::Settings settings;
  settings.timeout = std::chrono::milliseconds(static_cast<int64_t>(job.rpc_timeout_s * 1000));
  return c10::make_intrusive<collective::Backend>(agent.open_channel(kCollectiveChannel),
                                                  agent.executor(),
                                                  collective::Group{0, std::move(ranks)}, settings);
}

TrainersGroup trainers_group(rpc::Agent& agent,
                             const c10::intrusive_ptr<collective::Backend>& backend) {
  if (each_has_a_gpu(agent, *backend)) {
    return {std::make_shared<cuda::NcclReduceGroup>(backend, cuda::load()), "nccl"};
  }
  return {std::make_shared<collective::StagedReduceGroup>(backend),
          rpc::is_accelerator(agent.device()) ? "staged" : ""};
}

void check_averages(const TrainersGroup& group, c10::Device device) {
  if (!rpc::is_accelerator(device)) return;
  rpc::StreamPoint::mark(device).wait_on_host();
  if (const auto error = group.group->failure()) throw base::Exception(*error);
}

void tell(const TrainersGroup& group, EventSink& sink) {
  if (!group.how.empty()) sink.emit("ddp", {{"ddp", group.how}});
}

void refuse_other_data(int rank, const std::string& what_must_agree) {
  throw base::Exception(base::Error{base::ErrorKind::kBadData,
                                    "trainer " + std::to_string(rank) +
                                        " has read other data than the others: " + what_must_agree +
                                        " must be the same",
                                    rank, "attach"});
}

}  // namespace distrain::job
