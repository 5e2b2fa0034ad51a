#include "device/device_table.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>

namespace distrain::rpc {

namespace {

using base::Error;
using wire::DeviceRef;
using wire::DeviceType;
using wire::RankDevices;

constexpr std::pair<c10::DeviceType, DeviceType> kTypes[] = {
    {c10::kCPU, DeviceType::kCpu},
    {c10::kCUDA, DeviceType::kCuda},
    {c10::kPrivateUse1, DeviceType::kPrivate},
};

DeviceType to_wire(c10::DeviceType type) {
  for (const auto& [known, on_wire] : kTypes) {
    if (known == type) return on_wire;
  }
  base::invalid("tensors on a device of type " + c10::DeviceTypeName(type, true) +
                " cannot be sent");
}

c10::DeviceType c10_type(DeviceType type) { return kTypes[static_cast<size_t>(type)].first; }

int count_of(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU || !c10::impl::hasDeviceGuardImpl(type)) return 0;
  return c10::impl::getDeviceGuardImpl(type)->deviceCount();
}

// Returns `device` with its own index or, if it has none, with an index computed from `rank`.
c10::Device with_index(c10::Device device, int rank) {
  if (device.is_cpu() || device.has_index()) return device;
  const int count = count_of(device.type());
  return {device.type(), static_cast<c10::DeviceIndex>(count > 0 && rank > 0 ? rank % count : 0)};
}

Error invalid(std::string message, int rank) {
  return Error{base::ErrorKind::kInvalid, std::move(message), rank, "join"};
}

bool has(const RankDevices& devices, DeviceRef device) {
  return device.type == devices.type && device.index < devices.count && !device.is_cpu();
}

std::string who(const std::vector<std::string>& names, size_t rank) {
  return membership::rank_text(static_cast<int>(rank), names[rank]);
}

// Returns the first map for `peer` whose device `member` equals `device`; null if none does.
const RankDevices::Map* find_map(const RankDevices& of, const std::string& peer,
                                 DeviceRef RankDevices::Map::*member, DeviceRef device) {
  const auto map = std::ranges::find_if(of.maps, [&](const RankDevices::Map& entry) {
    return entry.peer == peer && entry.*member == device;
  });
  return map == of.maps.end() ? nullptr : &*map;
}

bool maps_to(const RankDevices& from, const std::string& peer) {
  return std::ranges::find(from.maps, peer, &RankDevices::Map::peer) != from.maps.end();
}

// Returns true if the two ranks' own devices are mapped to each other by default: both are
// accelerators, and no map between the two ranks names one of them.
bool homes_meet(const RankDevices& a, const std::string& a_name, const RankDevices& b,
                const std::string& b_name) {
  if (a.home.is_cpu() || b.home.is_cpu()) return false;
  const auto names = [](const RankDevices& from, const std::string& peer, DeviceRef home,
                        DeviceRef other) {
    return find_map(from, peer, &RankDevices::Map::from, home) ||
           find_map(from, peer, &RankDevices::Map::to, other);
  };
  return !names(a, b_name, a.home, b.home) && !names(b, a_name, b.home, a.home);
}

std::optional<Error> check_map(const std::vector<std::string>& names,
                               const std::vector<RankDevices>& devices, size_t rank,
                               const RankDevices::Map& map) {
  const auto refuse = [&](const std::string& what) {
    return invalid(fmt::format("the device map of {} for '{}' has {} to {}: {}", who(names, rank),
                               map.peer, device_text(map.from), device_text(map.to), what),
                   static_cast<int>(rank));
  };
  const auto it = std::ranges::find(names, map.peer);
  if (it == names.end()) return refuse("there is no rank of that name");
  const auto peer = static_cast<size_t>(it - names.begin());
  if (peer == rank) return refuse("a rank needs no map for itself");
  if (!has(devices[rank], map.from))
    return refuse(who(names, rank) + " has no " + device_text(map.from));
  if (!has(devices[peer], map.to))
    return refuse(who(names, peer) + " has no " + device_text(map.to));
  for (const RankDevices::Map& other : devices[rank].maps) {
    if (other.peer != map.peer || &other == &map) continue;
    if (other.from == map.from || other.to == map.to) {
      return refuse("another entry has one of the two: maps are one to one");
    }
  }
  // A reply uses the peer's map for this rank. Without such a map, it uses `map` in reverse.
  if (maps_to(devices[peer], names[rank]) &&
      !find_map(devices[peer], names[rank], &RankDevices::Map::from, map.to)) {
    return refuse(fmt::format("no way back for a reply, as the map of {} for '{}' has no {}",
                              who(names, peer), names[rank], device_text(map.to)));
  }
  return std::nullopt;
}

}  // namespace

c10::Device to_c10(DeviceRef device) {
  if (device.is_cpu()) return c10::kCPU;
  const c10::DeviceType type = c10_type(device.type);
  if (device.index >= count_of(type)) {
    wire::Reader::fail("a tensor for " + device_text(device) + ", which is not here");
  }
  return {type, static_cast<c10::DeviceIndex>(device.index)};
}

DeviceRef to_wire(c10::Device device) {
  if (device.is_cpu()) return {};
  const auto index = device.has_index() ? device.index() : c10::DeviceIndex{0};
  return {to_wire(device.type()), static_cast<uint8_t>(index)};
}

std::string device_text(DeviceRef device) {
  if (device.is_cpu()) return "cpu";
  return c10::Device(c10_type(device.type), static_cast<c10::DeviceIndex>(device.index)).str();
}

// Returns the first error in a job's device maps, if any: a device that does not exist, two devices
// mapped to the same one, or a device from which replies cannot be sent.
static std::optional<Error> check_device_maps(const std::vector<std::string>& names,
                                              const std::vector<RankDevices>& devices) {
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    const RankDevices& own = devices[rank];
    if (!own.home.is_cpu() && !has(own, own.home)) {
      return invalid(who(names, rank) + " has no " + device_text(own.home), static_cast<int>(rank));
    }
    for (const RankDevices::Map& map : own.maps) {
      if (auto error = check_map(names, devices, rank, map)) return error;
    }
  }
  return std::nullopt;
}

DeviceTable::DeviceTable(int rank, c10::Device home, std::vector<DeviceMap> maps)
    : rank_(rank), home_(with_index(home, rank)), maps_(std::move(maps)) {}

void DeviceTable::set_home(c10::Device home) {
  static_cast<void>(rpc::to_wire(home));
  std::lock_guard lock(mutex_);
  if (is_frozen_) base::invalid("a rank's device has to be set before its job has begun");
  home_ = with_index(home, rank_);
}

RankDevices DeviceTable::freeze() {
  std::lock_guard lock(mutex_);
  RankDevices own;
  own.home = rpc::to_wire(home_);
  c10::DeviceType type = home_.type();
  for (const DeviceMap& map : maps_) {
    for (const auto& [from, to] : map.devices) {
      if (from.is_cpu() && to.is_cpu()) continue;  // all CPU tensors arrive on the CPU
      if (type == c10::DeviceType::CPU) type = from.type();
      own.maps.push_back({map.peer, rpc::to_wire(from), rpc::to_wire(to)});
    }
  }
  // If no option names an accelerator, uses any available type: other ranks' maps may name it.
  for (const auto known : {c10::DeviceType::CUDA, c10::DeviceType::PrivateUse1}) {
    if (type == c10::DeviceType::CPU && count_of(known) > 0) type = known;
  }
  own.type = to_wire(type);
  own.count = static_cast<uint8_t>(std::min(count_of(type), 255));
  is_frozen_ = true;
  if (is_accelerator(home_) || !own.maps.empty()) use_streams_of(type);
  return own;
}

void DeviceTable::learn(std::vector<std::string> names, std::vector<RankDevices> devices) {
  if (devices.size() != names.size()) wire::Reader::fail("devices of other ranks than there are");
  if (known_.done()) wire::Reader::fail("everybody's devices a second time");
  if (const auto error = check_device_maps(names, devices)) throw base::Exception(*error);
  const auto self = static_cast<size_t>(rank_);
  for (const RankDevices& other : devices) {
    if (maps_to(other, names[self])) use_streams_of(c10_type(devices[self].type));
  }
  names_ = std::move(names);
  {
    std::lock_guard lock(mutex_);
    all_ = std::make_shared<const All>(std::move(devices));
  }
  learnt_.set();
}

void DeviceTable::learn_again(int rank, RankDevices devices) {
  if (!known_.done()) return;  // learn() will get the new devices
  All changed = *all();
  changed.at(static_cast<size_t>(rank)) = std::move(devices);
  if (const auto error = check_device_maps(names_, changed)) throw base::Exception(*error);
  std::lock_guard lock(mutex_);
  all_ = std::make_shared<const All>(std::move(changed));
}

DeviceRef DeviceTable::target(int to, c10::Device device) const {
  if (!is_accelerator(device)) return {};
  const DeviceRef own = rpc::to_wire(device);
  if (to == rank_) return own;
  known_.wait();
  const auto known = all();
  const auto of = [&known](int rank) -> const RankDevices& {
    return (*known)[static_cast<size_t>(rank)];
  };
  const std::string& peer = names_[static_cast<size_t>(to)];
  const std::string& name = names_[static_cast<size_t>(rank_)];
  if (maps_to(of(rank_), peer)) {
    if (const auto* map = find_map(of(rank_), peer, &RankDevices::Map::from, own)) return map->to;
  } else if (const auto* map = find_map(of(to), name, &RankDevices::Map::to, own)) {
    return map->from;
  }
  if (own == of(rank_).home && homes_meet(of(rank_), name, of(to), peer)) return of(to).home;
  throw base::Exception(
      Error{base::ErrorKind::kInvalid,
            "no device map says where a tensor on " + device.str() + " is to go on " +
                who(names_, static_cast<size_t>(to)) + ": give rank " + std::to_string(rank_) +
                " one, as in AgentOptions::device_maps = {{\"" + peer + "\", {{\"" + device.str() +
                "\", \"" + device_text({own.type, 0}) + "\"}}}}, or send tensor.cpu()",
            rank_});
}

}  // namespace distrain::rpc
