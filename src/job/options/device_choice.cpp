#include "distrain/job/device_choice.h"

#include <algorithm>

#include <c10/core/DeviceType.h>
#include <c10/util/StringUtil.h>

#include "distrain/base/text.h"
#include "distrain/rpc/error.h"

namespace distrain::job {

namespace {

constexpr int kMostDevices = 127;  // limit of c10::DeviceIndex

[[noreturn]] void refuse(const std::string& message) { base::invalid("--device " + message); }

std::string name_of(c10::DeviceType type) { return c10::DeviceTypeName(type, /*lower_case=*/true); }

DeviceChoice parse_device(std::string_view text, c10::DeviceType accelerator) {
  if (text == "cpu") return {};
  const std::string name = name_of(accelerator);
  if (text == name) return {true, std::nullopt};
  if (text.starts_with(name + ":")) {
    const auto index = base::number<uint8_t>(text.substr(name.size() + 1));
    if (index && *index <= kMostDevices) return {true, *index};
  }
  refuse("must be cpu, " + name + ", " + name + ":N or ROLE=DEVICE[,...], not '" +
         std::string(text) + "'");
}

std::string_view without_number(std::string_view name) {
  const size_t last = name.find_last_not_of("0123456789");
  return last == std::string_view::npos ? std::string_view() : name.substr(0, last + 1);
}

}  // namespace

DeviceSpec::DeviceSpec(std::string_view text, c10::DeviceType accelerator,
                       std::vector<DeviceRole> roles)
    : roles_(std::move(roles)) {
  if (text.find('=') == std::string_view::npos) {
    for_all_ = parse_device(text, accelerator);
    return;
  }
  for (const std::string_view part : base::split(text, ',')) {
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      refuse("names a role before each device, as in ROLE=DEVICE,ROLE=DEVICE; '" +
             std::string(part) + "' has none");
    }
    add(part.substr(0, equals), part.substr(equals + 1), accelerator);
  }
}

const DeviceRole* DeviceSpec::class_of(std::string_view name) const {
  const auto it = std::ranges::find_if(roles_, [&](const DeviceRole& role) {
    return name == role.name || (!role.alias.empty() && name == role.alias);
  });
  return it == roles_.end() ? nullptr : &*it;
}

std::string DeviceSpec::known_roles() const {
  std::string known;
  for (const DeviceRole& role : roles_) {
    if (role.use == DeviceRole::Use::kNone) continue;
    known += (known.empty() ? "" : ", ") + role.name;
    if (!role.alias.empty()) known += " (or " + role.alias + ")";
  }
  return known;
}

void DeviceSpec::add(std::string_view role, std::string_view device, c10::DeviceType accelerator) {
  const DeviceChoice choice = parse_device(device, accelerator);
  const DeviceRole* found = class_of(role);
  std::string number;
  if (!found) {  // a rank: trainer1, or by alias stage1 for worker1
    const std::string_view beginning = without_number(role);
    number = role.substr(beginning.size());
    found = number.empty() ? nullptr : class_of(beginning);
  }
  if (!found) refuse("names the role '" + std::string(role) + "', but there are " + known_roles());
  if (choice.accelerator && found->use == DeviceRole::Use::kNone) {
    refuse("names " + std::string(role) + ", which computes nothing that a GPU could");
  }
  if (!by_name_.emplace(found->name + number, choice).second) {
    refuse("names " + std::string(role) + " twice");
  }
}

std::optional<DeviceChoice> DeviceSpec::named(const std::string& rank_name) const {
  for (const auto& name : {rank_name, std::string(without_number(rank_name))}) {
    if (const auto it = by_name_.find(name); it != by_name_.end()) return it->second;
  }
  return std::nullopt;
}

DeviceChoice DeviceSpec::of(const std::string& rank_name) const {
  if (const auto own = named(rank_name)) return *own;
  if (!for_all_ || !for_all_->accelerator) return {};
  const DeviceRole* role = class_of(rank_name);
  if (!role) role = class_of(without_number(rank_name));
  const bool computes = !role || role->use == DeviceRole::Use::kCompute;
  return computes ? *for_all_ : DeviceChoice();
}

void DeviceSpec::check_ranks(const std::vector<std::string>& rank_names) const {
  for (const auto& [name, choice] : by_name_) {
    if (class_of(name) || std::find(rank_names.begin(), rank_names.end(), name) != rank_names.end())
      continue;
    refuse("names " + name + ", but the ranks are " + c10::Join(", ", rank_names));
  }
}

c10::Device resolve_device(const DeviceChoice& choice, const Accelerators& accelerators,
                           int place) {
  if (!choice.accelerator) return c10::kCPU;
  const int count = accelerators.count();
  const int index = choice.index.value_or(place % count);
  if (index < count) return {accelerators.type(), static_cast<c10::DeviceIndex>(index)};
  const std::string name = name_of(accelerators.type()) + ":";
  std::string there = name + "0";
  if (count > 1) there += " to " + name + std::to_string(count - 1);
  throw base::Exception(base::ErrorKind::kResources, "there is no " + name + std::to_string(index) +
                                                         " on this host, only " + there);
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
