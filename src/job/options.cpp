#include <algorithm>
#include <cmath>

#include <c10/core/DeviceType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/job/definition.h"
#include "distrain/rpc/error.h"

namespace distrain::job {

namespace {

using base::invalid;
using base::number;
using base::shortest;

/// Returns the range in words: " from 1 to 65535", " of 1 or more", " above 0 and up to 1000000".
std::string range_words(const Option& option) {
  const std::string min = fmt::format("{:.16g}", option.min);
  const std::string max = fmt::format("{}{:.16g}", option.below_max ? "below " : "", option.max);
  const bool open = option.max >= 9e18;
  if (open) return option.above_min ? " above " + min : " of " + min + " or more";
  return option.above_min ? fmt::format(" above {} and up to {}", min, max)
                          : fmt::format(" from {} to {}", min, max);
}

/// Returns `text` as a number of the option's range. Throws `invalid` naming `where` otherwise.
template <class T>
T checked_number(const Option& option, std::string_view text, std::string_view where) {
  const std::optional<T> value = number<T>(text);
  const double real = value ? static_cast<double>(*value) : NAN;
  const bool above = option.above_min ? real > option.min : real >= option.min;
  const bool below = option.below_max ? real < option.max : real <= option.max;
  if (above && below && std::isfinite(real)) return *value;
  invalid(fmt::format("{} must be {}, not '{}'", where, allowed_values(option), text));
}

}  // namespace

std::string json_name(const Option& option) {
  std::string name = option.name;
  std::ranges::replace(name, '-', '_');
  return name;
}

const Option* find_option(const OptionTable& table, std::string_view name) {
  for (const Option& option : table) {
    if (!name.empty() && (option.name == name || option.old_name == name)) return &option;
  }
  return nullptr;
}

std::string allowed_values(const Option& option) {
  const std::string words = fmt::format("{}", fmt::join(option.choices, ", "));
  if (option.kind == ValueKind::kChoice) return "one of " + words;
  if (option.kind == ValueKind::kText) return option.value_name;
  return fmt::format("{}{}{}{}", words, words.empty() ? "" : " or ",
                     option.kind == ValueKind::kReal ? "a number" : "a whole number",
                     range_words(option));
}

std::string canonical_value(const Option& option, std::string_view text, std::string_view where) {
  const bool is_word = std::ranges::find(option.choices, text) != option.choices.end();
  switch (option.kind) {
    case ValueKind::kFlag:
      return text == "false" ? "false" : "true";
    case ValueKind::kInteger:
      if (is_word) break;
      return std::to_string(checked_number<int64_t>(option, text, where));
    case ValueKind::kIntegers: {
      Option one = option;
      one.kind = ValueKind::kInteger;
      std::vector<std::string> values;
      for (const auto part : base::split(text, ',')) {
        values.push_back(canonical_value(one, part, where));
      }
      return detail::write_value(values);
    }
    case ValueKind::kReal: {
      if (is_word) break;
      const double value = checked_number<double>(option, text, where);
      return !option.choices.empty() && value == 0 ? "off" : shortest(value);
    }
    case ValueKind::kChoice: {
      if (is_word) break;
      const auto meant = base::did_you_mean(text, option.choices);
      invalid(fmt::format("{} must be {}, not '{}'{}", where, allowed_values(option), text,
                          meant ? fmt::format("; did you mean {}?", *meant) : ""));
    }
    case ValueKind::kText:
      if (!text.empty() || (option.may_be_empty && !option.initial.empty())) break;
      invalid(fmt::format("{} needs a value: {}", where, allowed_values(option)));
  }
  return std::string(text);
}

Json json_value(const Option& option, const std::string& canonical) {
  if (canonical.empty()) return Json();
  if (option.kind == ValueKind::kFlag) return canonical == "true";
  if (option.kind == ValueKind::kIntegers) {
    std::vector<int64_t> values;
    detail::read_value(canonical, values);
    return values;
  }
  // A number option may have a word instead.
  const auto or_word = [&](auto value) { return value ? Json(*value) : Json(canonical); };
  if (option.kind == ValueKind::kInteger) return or_word(number<int64_t>(canonical));
  if (option.kind == ValueKind::kReal) return or_word(number<double>(canonical));
  return canonical;
}

std::string ParsedOptions::text(std::string_view name) const {
  for (const OptionMap* values : {&values_, &derived_}) {
    if (const auto it = values->find(std::string(name)); it != values->end()) return it->second;
  }
  const Option* option = find_option(*table_, name);
  return option ? option->initial : std::string();
}

ParsedOptions ParsedOptions::adopting(const OptionMap& of_rank_0) const {
  ParsedOptions adopted = *this;
  for (const Option& option : *table_) {
    const auto it = of_rank_0.find(option.name);
    if (!is_job_option(option) || it == of_rank_0.end()) continue;
    if (option.scope == Scope::kInput && given(option.name)) continue;
    if (!it->second.empty() || !(option.initial.empty() || option.each_own)) {
      adopted.set(option.name, canonical_value(option, it->second, "rank 0's --" + option.name));
    } else if (!given(option.name)) {  // discards the value derived from this rank's options
      adopted.derive(option.name, option.initial);
    }
  }
  return adopted;
}

void derive_limits(TrainerOptions& options, const ParsedOptions& parsed, int default_epochs) {
  const bool by_epochs = parsed.given("epochs"), by_steps = parsed.given("steps");
  if (by_steps && !by_epochs && options.steps > 0) options.epochs = 0;
  if (by_epochs && !by_steps) options.steps = 0;
  if (!by_epochs && options.epochs == 0 && options.steps == 0) options.epochs = default_epochs;
}

void RuleOptions::name_rules(OptionTable& table) {
  const Option* const optimizer = find_option(table, "optimizer");
  const auto offers = [&](const char* rule) {
    return !optimizer || std::ranges::count(optimizer->choices, rule) > 0;
  };
  std::string rules = offers("sgd") ? " for sgd" : "";
  if (offers("rmsprop")) rules += rules.empty() ? " for rmsprop" : " and rmsprop";
  for (Option& option : table) {
    std::string& decay = option.initial_in_words;
    if (decay.starts_with("0.01 for adamw") && !offers("adamw")) decay = "0";
    if (option.help.starts_with("set momentum for sgd")) option.help = "set momentum" + rules;
  }
}

optim::Sharing TrainerOptions::sharing(int participant) const {
  using Mode = optim::Sharing::Mode;
  return {.mode = mode == "sync"  ? Mode::kSync
                  : mode == "ssp" ? Mode::kSsp
                                  : Mode::kAsync,
          .participants = trainers,
          .participant = participant,
          .staleness = staleness};
}

RankBody::Known known_options(const OptionTable& table, const OptionMap& values) {
  RankBody::Known known;
  const auto data = values.find("data");
  const bool has_data = data != values.end() && is_path(*find_option(table, "data"), data->second);
  for (const Option& option : table) {
    // Checkpoints record how often to save, but neither the folder nor what to resume.
    const bool saved_where = option.group == "Checkpoints" && option.needs != "checkpoint";
    const bool has_effect = !(has_data ? option.random_only : option.data_only);
    if (!is_job_option(option) || saved_where || !has_effect || option.each_own) continue;
    const std::string& value = values.at(option.name);
    try {
      static_cast<void>(Json(value).dump());
    } catch (const Json::type_error&) {
      continue;  // a path that is not UTF-8 cannot be in a manifest
    }
    known.options[option.name] = value;
    if (!option.may_change) known.must_agree.push_back(option.name);
  }
  return known;
}

bool Preflight::starts(const std::string& role) const {
  return local || std::ranges::any_of(ranks, [&](int rank) { return roles.named(role).has(rank); });
}

namespace {

constexpr int kMostDevices = 127;  // limit of c10::DeviceIndex

[[noreturn]] void refuse(const std::string& message) { base::invalid("--device " + message); }

DeviceChoice parse_device(std::string_view text, c10::DeviceType accelerator) {
  if (text == "cpu") return {};
  const std::string name = c10::DeviceTypeName(accelerator, /*lower_case=*/true);
  if (text == name) return {true, std::nullopt};
  if (text.starts_with(name + ":")) {
    const auto index = base::number<uint8_t>(text.substr(name.size() + 1));
    if (index && *index <= kMostDevices) return {true, *index};
  }
  refuse(fmt::format("must be cpu, {0}, {0}:N or ROLE=DEVICE[,...], not '{1}'", name, text));
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
      refuse(fmt::format(
          "names a role before each device, as in ROLE=DEVICE,ROLE=DEVICE; '{}' has none", part));
    }
    add(part.substr(0, equals), part.substr(equals + 1), accelerator);
  }
}

const DeviceRole* DeviceSpec::class_of(std::string_view name) const {
  const auto it = std::ranges::find_if(roles_, [&](const DeviceRole& role) {
    return !name.empty() && (name == role.name || name == role.alias);
  });
  return it == roles_.end() ? nullptr : &*it;
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
  if (!found) {
    std::vector<std::string> known;
    for (const DeviceRole& each : roles_) {
      if (each.use == DeviceRole::Use::kNone) continue;
      known.push_back(each.name + (each.alias.empty() ? "" : " (or " + each.alias + ")"));
    }
    refuse(fmt::format("names the role '{}', but there are {}", role, fmt::join(known, ", ")));
  }
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
    if (class_of(name) || std::ranges::count(rank_names, name) > 0) continue;
    refuse(fmt::format("names {}, but the ranks are {}", name, fmt::join(rank_names, ", ")));
  }
}

c10::Device resolve_device(const DeviceChoice& choice, const std::function<int()>& count_gpus,
                           int place) {
  if (!choice.accelerator) return c10::kCPU;
  const int count = count_gpus();
  const int index = choice.index.value_or(place % count);
  if (index < count) return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
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
