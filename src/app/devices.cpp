#include "distrain/app/devices.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/cuda/load.h"
#include "distrain/rpc/device.h"

namespace distrain::app {
namespace {

using cuda::DeviceChoice;
using cuda::DeviceSpec;

constexpr double kMegabyte = 1024.0 * 1024.0;
const DeviceChoice kAnyGpu = {true, std::nullopt};

class Gpus final : public cuda::Accelerators {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  int count() const override { return cuda::load().device_count(); }
};

/// The number of a process among those of its host, as the launcher that started it says.
std::optional<int> local_rank(const Environment& environment) {
  for (const char* name :
       {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) {
    const std::optional<std::string> text = environment(name);
    // Outside a step Slurm's is the batch script's.
    if (!text || (name == std::string_view("SLURM_LOCALID") && !environment("SLURM_STEP_ID"))) {
      continue;
    }
    int value = -1;
    const char* end = text->data() + text->size();
    const auto [stop, error] = std::from_chars(text->data(), end, value);
    if (error == std::errc{} && stop == end && value >= 0) return value;
    throw base::Exception(
        base::ErrorKind::kInvalid,
        fmt::format("the environment variable {} must be a whole number of 0 or more, not '{}'",
                    name, *text));
  }
  return std::nullopt;
}

/// Of the rank among those of its host that take the GPUs in turn. Where nobody says which ranks
/// are on this host, all are counted: however they are spread, neighbours by number get GPUs side
/// by side, as the place is taken modulo the number of GPUs.
int place_among_neighbours(const ParsedOptions& options, const DeviceSpec& spec,
                           const Placement& placement, const DevicePlace& place,
                           const Environment& environment) {
  if (placement.mode == Placement::Mode::kLocal) return 0;
  std::vector<int> neighbours = placement.ranks;
  if (placement.mode == Placement::Mode::kJoin) {
    if (const auto told = local_rank(environment)) return *told;
    neighbours.clear();
    for (int rank = 0; rank < place.rank; ++rank) neighbours.push_back(rank);
  }
  return static_cast<int>(std::count_if(neighbours.begin(), neighbours.end(), [&](const int rank) {
    return rank < place.rank && spec.of(place.role(options, rank)) == kAnyGpu;
  }));
}

/// GPUs that the rank takes by the number of them.
std::optional<int> counted_gpus(const ParsedOptions& options, const DeviceRules& rules,
                                const DevicePlace& place) {
  return rules.gpus_of ? rules.gpus_of(options, place.name) : std::nullopt;
}

}  // namespace

DeviceSpec device_spec(const ParsedOptions& options, const DeviceRules& rules) {
  return {options.text("device"), c10::kCUDA, rules.roles};
}

void check_devices(const ParsedOptions& options, const DeviceRules& rules,
                   const Placement& placement,
                   const std::function<std::string(const ParsedOptions&, int rank)>& role) {
  const DeviceSpec spec = device_spec(options, rules);
  if (placement.mode == Placement::Mode::kLocal && !spec.for_all()) {
    throw base::Exception(base::ErrorKind::kInvalid,
                          "--device names roles, but --local is one process: name one device");
  }
  if (placement.world_size == 0 || placement.mode == Placement::Mode::kLocal) return;
  std::vector<std::string> names;
  for (int rank = 0; rank < placement.world_size; ++rank) names.push_back(role(options, rank));
  spec.check_ranks(names);
}

std::optional<int> place_in_turn(const ParsedOptions& options, const DeviceRules& rules,
                                 const Placement& placement, const DevicePlace& place,
                                 const Environment& environment) {
  const DeviceSpec spec = device_spec(options, rules);
  if (counted_gpus(options, rules, place) || spec.of(place.name) != kAnyGpu) return std::nullopt;
  return place_among_neighbours(options, spec, placement, place, environment);
}

std::vector<c10::Device> choose_devices(const ParsedOptions& options, const DeviceRules& rules,
                                        const Placement& placement, const DevicePlace& place,
                                        const Environment& environment) {
  const Gpus gpus;
  const DeviceSpec spec = device_spec(options, rules);
  return cuda::naming_rank(place.rank, place.name, [&] {
    std::vector<c10::Device> devices;
    const auto count = counted_gpus(options, rules, place);
    for (int gpu = 0; gpu < count.value_or(0); ++gpu) {
      devices.push_back(resolve({true, gpu}, gpus, 0));
    }
    if (!devices.empty()) return devices;
    const DeviceChoice choice = count ? DeviceChoice() : spec.of(place.name);
    const auto turn = place_in_turn(options, rules, placement, place, environment);
    return std::vector<c10::Device>{resolve(choice, gpus, turn.value_or(0))};
  });
}

const std::vector<c10::Device>& RankDevices::get(const std::string& rank_name,
                                                 const job::OptionMap& of_rank_0) {
  if (devices_.empty() && !error_) {
    try {
      std::vector<c10::Device> chosen = choose_(rank_name, of_rank_0);
      const std::lock_guard lock(mutex_);
      devices_ = std::move(chosen);
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  if (error_) std::rethrow_exception(error_);
  return devices_;
}

std::vector<c10::Device> RankDevices::known() const {
  const std::lock_guard lock(mutex_);
  return devices_;
}

Json RankDevices::names() const {
  const std::vector<c10::Device> devices = known();
  return devices.empty() ? Json() : job::device_names(devices);
}

bool RankDevices::has_accelerator() const {
  const std::vector<c10::Device> devices = known();
  return !devices.empty() && rpc::is_accelerator(devices.front());
}

Json RankDevices::usage() const {
  if (!has_accelerator()) return Json::object();
  int64_t most = 0;
  for (const c10::Device& device : known()) most = std::max(most, rpc::peak_device_bytes(device));
  return {{"device", names()}, {"device_mem_mb", static_cast<double>(most) / kMegabyte}};
}

}  // namespace distrain::app
