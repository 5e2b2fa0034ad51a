#include "distrain/job/device_choice.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/base/text.h"
#include "distrain/rpc/error.h"

namespace distrain::job {

namespace {

constexpr int kMostDevices = 127;  // limit of c10::DeviceIndex

[[noreturn]] void refuse(const std::string& message) { base::invalid("--device " + message); }

c10::Device gpu(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

c10::Device parse_device(std::string_view text) {
  constexpr std::string_view kIndexed = "cuda:";
  if (text == "cpu") return c10::kCPU;
  if (text == "cuda") return c10::kCUDA;
  if (text.starts_with(kIndexed)) {
    const auto index = base::number<uint8_t>(text.substr(kIndexed.size()));
    if (index && *index <= kMostDevices) return gpu(*index);
  }
  refuse(fmt::format("must be cpu, cuda, cuda:N or ROLE=DEVICE[,...], not '{}'", text));
}

std::string_view without_number(std::string_view name) {
  const size_t last = name.find_last_not_of("0123456789");
  return last == std::string_view::npos ? std::string_view() : name.substr(0, last + 1);
}

}  // namespace

DeviceSpec::DeviceSpec(std::string_view text, std::vector<DeviceRole> roles)
    : roles_(std::move(roles)) {
  if (text.find('=') == std::string_view::npos) {
    for_all_ = parse_device(text);
    return;
  }
  for (const std::string_view part : base::split(text, ',')) {
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      refuse(fmt::format(
          "names a role before each device, as in ROLE=DEVICE,ROLE=DEVICE; '{}' has none", part));
    }
    add(part.substr(0, equals), part.substr(equals + 1));
  }
}

const DeviceRole* DeviceSpec::class_of(std::string_view name) const {
  const auto it = std::ranges::find_if(roles_, [&](const DeviceRole& role) {
    return !name.empty() && (name == role.name || name == role.alias);
  });
  return it == roles_.end() ? nullptr : &*it;
}

void DeviceSpec::add(std::string_view role, std::string_view device) {
  const c10::Device choice = parse_device(device);
  const DeviceRole* found = class_of(role);
  std::string number;
  if (!found) {  // `role` may name a rank: trainer1, or stage1 if stage is an alias of worker
    const std::string_view beginning = without_number(role);
    number = role.substr(beginning.size());
    found = number.empty() ? nullptr : class_of(beginning);
  }
  if (!found) {
    std::vector<std::string> known;
    for (const DeviceRole& each : roles_) {
      if (each.use == DeviceRole::Use::kNone) continue;
      known.push_back(each.name + (each.alias.empty() ? "" : " (or " + each.alias + ")"));
    }
    refuse(fmt::format("names the role '{}', but there are {}", role, fmt::join(known, ", ")));
  }
  if (!choice.is_cpu() && found->use == DeviceRole::Use::kNone) {
    refuse("names " + std::string(role) + ", which computes nothing that a GPU could");
  }
  if (!by_name_.emplace(found->name + number, choice).second) {
    refuse("names " + std::string(role) + " twice");
  }
}

std::optional<c10::Device> DeviceSpec::named(const std::string& rank_name) const {
  for (const auto& name : {rank_name, std::string(without_number(rank_name))}) {
    if (const auto it = by_name_.find(name); it != by_name_.end()) return it->second;
  }
  return std::nullopt;
}

c10::Device DeviceSpec::of(const std::string& rank_name) const {
  if (const auto own = named(rank_name)) return *own;
  if (!for_all_ || for_all_->is_cpu()) return c10::kCPU;
  const DeviceRole* role = class_of(rank_name);
  if (!role) role = class_of(without_number(rank_name));
  const bool computes = !role || role->use == DeviceRole::Use::kCompute;
  return computes ? *for_all_ : c10::kCPU;
}

void DeviceSpec::check_ranks(const std::vector<std::string>& rank_names) const {
  for (const auto& [name, choice] : by_name_) {
    if (class_of(name) || std::ranges::count(rank_names, name) > 0) continue;
    refuse(fmt::format("names {}, but the ranks are {}", name, fmt::join(rank_names, ", ")));
  }
}

c10::Device resolve_device(const c10::Device& choice, const std::function<int()>& count_gpus,
                           int place) {
  if (choice.is_cpu()) return choice;
  const int count = count_gpus();
  const int index = choice.has_index() ? choice.index() : place % count;
  if (index < count) return gpu(index);
  throw base::Exception(base::ErrorKind::kResources,
                        fmt::format("there is no cuda:{} on this host, only cuda:0{}", index,
                                    count > 1 ? fmt::format(" to cuda:{}", count - 1) : ""));
}

base::Error error_of_rank(base::Error error, int rank, const std::string& name) {
  const std::string number = "rank " + std::to_string(rank);
  const std::string& told = error.message;
  if (!told.starts_with(number + ":") && !told.starts_with(number + " (")) {
    error.message = number + (name.empty() ? "" : " (" + name + ")") + ": " + told;
  }
  error.rank = rank;
  return error;
}

std::vector<c10::Device> naming_rank(int rank, const std::string& name,
                                     const std::function<std::vector<c10::Device>()>& choose) {
  try {
    return choose();
  } catch (...) {
    base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
    if (error.op.empty()) error.op = "device";
    throw base::Exception(error_of_rank(std::move(error), rank, name));
  }
}

}  // namespace distrain::job
