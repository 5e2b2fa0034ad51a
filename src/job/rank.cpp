#include "distrain/job/rank.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/collective/staged_reduce_group.h"
#include "distrain/cuda/load.h"
#include "distrain/cuda/nccl_reduce_group.h"
#include "distrain/rpc/device.h"

namespace distrain::job {

namespace {

constexpr uint16_t kFirstGroupChannel = 16;  // those below are the layers' below
constexpr int64_t kIdBytes = 64;             // of a GPU's id, cut off or filled up

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

[[noreturn]] void no_role(const std::string& what) {
  throw base::Exception(base::ErrorKind::kInternal, what);
}

}  // namespace

void Roles::add(const std::string& name, int count, bool numbered) {
  roles_.push_back({name, world_size(), count, numbered});
}

int Roles::world_size() const {
  return roles_.empty() ? 0 : roles_.back().first + roles_.back().count;
}

const Roles::Role& Roles::named(const std::string& name) const {
  for (const Role& role : roles_) {
    if (role.name == name) return role;
  }
  no_role("the job has no role " + name);
}

const Roles::Role& Roles::of(int rank) const {
  for (const Role& role : roles_) {
    if (rank >= role.first && rank < role.first + role.count) return role;
  }
  no_role("the job has no rank " + std::to_string(rank));
}

std::string Roles::name_of(int rank) const {
  const Role& role = of(rank);
  return role.numbered ? role.name + std::to_string(rank) : role.name;
}

std::vector<std::string> Roles::names() const {
  std::vector<std::string> names;
  for (int rank = 0; rank < world_size(); ++rank) names.push_back(name_of(rank));
  return names;
}

Group::Group(rpc::Agent& agent, const Roles::Role& role, uint16_t channel,
             std::chrono::milliseconds timeout) {
  std::vector<int> ranks(static_cast<size_t>(role.count));
  std::iota(ranks.begin(), ranks.end(), role.first);
  collective::Backend::Settings settings;
  settings.timeout = timeout;
  backend_ =
      c10::make_intrusive<collective::Backend>(agent.open_channel(channel), agent.executor(),
                                               collective::Group{0, std::move(ranks)}, settings);
  if (each_has_a_gpu(agent, *backend_)) {
    reduce_ = std::make_shared<cuda::NcclReduceGroup>(backend_, cuda::load());
    how_ = "nccl";
  } else {
    reduce_ = std::make_shared<collective::StagedReduceGroup>(backend_);
    if (rpc::is_accelerator(agent.device())) how_ = "staged";
  }
}

void check_averages(const collective::ReduceGroup& group, c10::Device device) {
  if (!rpc::is_accelerator(device)) return;
  rpc::StreamPoint::mark(device).wait_on_host();
  if (const auto error = group.failure()) throw base::Exception(*error);
}

Rank::Rank(rpc::Agent& agent, const Job& job, const Roles& roles, EventSink& sink)
    : agent_(agent), job_(job), roles_(roles), role_(roles.of(agent.rank())), sink_(sink) {}

const Group& Rank::group(const std::string& role) {
  if (const auto it = groups_.find(role); it != groups_.end()) return it->second;
  const Roles::Role& ranks = roles_.named(role);
  if (number() < ranks.first || number() >= ranks.first + ranks.count) {
    throw base::Exception(base::ErrorKind::kInvalid,
                          name() + " is not of the role " + role + ", so not in its group");
  }
  if (groups_closed_) {
    throw base::Exception(base::ErrorKind::kInvalid,
                          "the group of the role " + role + " is to be made before the training");
  }
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(job_.rpc_timeout_s * 1000));
  const auto channel = static_cast<uint16_t>(kFirstGroupChannel + ranks.first);
  const Group& made = groups_
                          .emplace(std::piecewise_construct, std::forward_as_tuple(role),
                                   std::forward_as_tuple(agent_, ranks, channel, timeout))
                          .first->second;
  if (!made.how().empty()) {
    sink_.emit("ddp", {{"ddp", made.how()}});
    fields_["ddp"] = made.how();
  }
  return made;
}

void Rank::check_groups() const {
  for (const auto& [role, group] : groups_) group.check(device());
}

}  // namespace distrain::job
