#include "devices.h"

#include <algorithm>
#include <numeric>

#include "distrain/base/error.h"
#include "distrain/cuda/load.h"
#include "distrain/membership/slot.h"
#include "distrain/rpc/device.h"

namespace distrain::app {
namespace {

using job::DeviceChoice;
using job::DeviceSpec;
using job::ParsedOptions;

const DeviceChoice kAnyGpu = {true, std::nullopt};

int count_gpus() { return cuda::load().device_count(); }

DeviceSpec device_spec(const ParsedOptions& options, const job::AnyDefinition& job) {
  return {options.text("device"), c10::kCUDA, job.info().roles};
}

}  // namespace

void check_devices(const ParsedOptions& options, const job::AnyDefinition& job,
                   const Placement& placement) {
  const DeviceSpec spec = device_spec(options, job);
  const bool local = placement.mode == Placement::Mode::kLocal;
  if (local && !spec.for_all()) {
    base::invalid("--device names roles, but --local is one process: name one device");
  }
  if (placement.world_size != 0 && !local) spec.check_ranks(job.roles(options).names());
}

std::optional<int> place_in_turn(const ParsedOptions& options, const job::AnyDefinition& job,
                                 const Placement& placement, int rank, const std::string& name) {
  const DeviceSpec spec = device_spec(options, job);
  if (job.gpus(options, name) || spec.of(name) != kAnyGpu) return std::nullopt;
  if (placement.mode == Placement::Mode::kLocal) return 0;
  // Count the lower ranks of this host that share the GPUs in turn. If it is unknown which ranks
  // are on this host, count all lower ranks: consecutive ranks still get consecutive GPUs.
  std::vector<int> neighbours = placement.ranks;
  if (placement.mode == Placement::Mode::kJoin) {
    if (const auto told = local_rank(options.table())) return *told;
    if (rank == membership::kUnassignedRank) return std::nullopt;
    neighbours.resize(static_cast<size_t>(rank));
    std::iota(neighbours.begin(), neighbours.end(), 0);
  }
  const job::Roles roles = job.roles(options);
  return static_cast<int>(std::ranges::count_if(neighbours, [&](int other) {
    return other < rank && spec.of(roles.name_of(other)) == kAnyGpu;
  }));
}

std::vector<c10::Device> RankDevices::choose(const ParsedOptions& options,
                                             const std::string& name) const {
  const auto count = job_.gpus(options, name);
  std::vector<c10::Device> devices;
  for (int gpu = 0; gpu < count.value_or(0); ++gpu) {
    devices.push_back(job::resolve_device({true, gpu}, count_gpus, 0));
  }
  if (!devices.empty()) return devices;
  const DeviceChoice choice = count ? DeviceChoice() : device_spec(options, job_).of(name);
  const auto turn = place_in_turn(options, job_, placement_, rank_, name);
  return {job::resolve_device(choice, count_gpus, turn.value_or(0))};
}

const std::vector<c10::Device>& RankDevices::get(const std::string& rank_name,
                                                 const job::OptionMap& of_rank_0) {
  if (!devices_.empty()) return devices_;
  const ParsedOptions options = options_.adopting(of_rank_0);
  std::vector<c10::Device> chosen =
      job::naming_rank(rank_, rank_name, [&] { return choose(options, rank_name); });
  const std::lock_guard lock(mutex_);
  devices_ = std::move(chosen);
  return devices_;
}

std::vector<c10::Device> RankDevices::known() const {
  const std::lock_guard lock(mutex_);
  return devices_;
}

job::Json RankDevices::names() const {
  const std::vector<c10::Device> devices = known();
  return devices.empty() ? job::Json() : job::device_names(devices);
}

job::Json RankDevices::usage() const {
  const std::vector<c10::Device> devices = known();
  if (devices.empty() || !rpc::is_accelerator(devices.front())) return job::Json::object();
  int64_t most = 0;
  for (const c10::Device& device : devices) most = std::max(most, rpc::peak_device_bytes(device));
  return {{"device", names()}, {"device_mem_mb", static_cast<double>(most) / (1 << 20)}};
}

}  // namespace distrain::app
