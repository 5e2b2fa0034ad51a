#include "process/json_lines.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <regex>

#include <fmt/format.h>
#include <string.h>

#include "process/process_setup.h"

namespace distrain::app {
namespace {

double rounded(double value, double parts) { return std::round(value * parts) / parts; }

/// Adds each field to the sum of the same name, if there is one.
void sum_up(const Json& fields, Json& sums) {
  for (const auto& [name, sum] : sums.items()) {
    const auto value = fields.find(name);
    if (value == fields.end() || !value->is_number()) continue;
    sum = sum.get<int64_t>() + value->get<int64_t>();
  }
}

/// Fields of a rank's last line that are not metrics of the job.
constexpr std::string_view kCommon[] = {
    "v",       "ts",         "run",           "seed",        "config", "event",
    "cmd",     "rank",       "role",          "status",      "wall_s", "exit_code",
    "train_s", "steps",      "steps_per_s",   "rpc",         "rss_mb", "kind",
    "signal",  "live_rrefs", "live_contexts", "message",     "host",   "cause_rank",
    "op",      "cause_role", "scope",         "stderr_tail", "device", "device_mem_mb"};

}  // namespace

Json json_event(std::string_view event, const std::string& run_id, const std::string& cmd,
                std::optional<int> rank, const std::string& role, const Json& fields) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  Json line{{"v", 1},
            {"ts", static_cast<double>(us) / 1e6},
            {"run", or_null(run_id)},
            {"event", event},
            {"cmd", or_null(cmd)},
            {"rank", or_null(rank)},
            {"role", or_null(role)}};
  if (fields.is_object()) line.update(fields);
  return line;
}

std::string line_of(const Json& event) {
  // File names and messages may contain invalid UTF-8, which dump() would throw for.
  return event.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::optional<double> number_in(const Json& fields, const std::string& name) {
  const auto value = fields.find(name);
  if (value == fields.end() || !value->is_number()) return std::nullopt;
  return value->get<double>();
}

std::string text_in(const Json& fields, const char* name) {
  const auto value = fields.find(name);
  return value != fields.end() && value->is_string() ? value->get<std::string>() : std::string();
}

Cause cause_of(const base::Error& error) {
  return {.rank = error.rank >= 0 ? std::optional(error.rank) : std::nullopt,
          .kind = std::string(base::kind_name(error.kind)),
          .message = error.message,
          .op = error.op,
          .exit_code = base::exit_code(error.kind)};
}

Cause cause_by_signal(int number, std::optional<int> rank) {
  const std::string name = signal_name(number);
  return {.rank = rank,
          .host = host_name(),
          .signal = name,
          .kind = std::string(base::kind_name(base::ErrorKind::kCancelled)),
          .message = "ended by " + name,
          .exit_code = 128 + number};
}

std::string rank_name(int rank, const std::string& role) {
  return fmt::format("rank {}{}", rank, role.empty() ? "" : " (" + role + ")");
}

std::string message_of(const Cause& cause) {
  const bool is_of_job = !cause.rank || cause.role == "local" || cause.kind == kGoalNotReached ||
                         cause.kind == base::kind_name(base::ErrorKind::kCancelled);
  const bool is_named =
      is_of_job || std::regex_search(cause.message, std::regex(rank_name(*cause.rank, "") + "\\b"));
  return is_named ? cause.message : rank_name(*cause.rank, cause.role) + ": " + cause.message;
}

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

Json error_fields(const Cause& cause, base::TimePoint started) {
  return {{"kind", cause.kind},
          {"message", cause.message},
          {"cause_rank", or_null(cause.rank)},
          {"op", or_null(cause.op)},
          {"elapsed_s", rounded(base::seconds_since(started), 1e6)},
          {"exit_code", cause.exit_code}};
}

void Summary::add(const Json& fields) {
  sum_up(fields, sums_);
  sum_up(fields.value("rpc", Json()), rpc_);
  for (const char* name : {"train_s", "rss_mb", "device_mem_mb"}) {
    if (const auto value = number_in(fields, name)) most_[name] = std::max(most_[name], *value);
  }
  const Json devices = fields.value("device", Json());
  for (const Json& device : devices.is_array() ? devices : Json::array({devices})) {
    if (!device.is_string()) continue;
    const auto& name = device.get_ref<const std::string&>();
    if (std::ranges::find(devices_, name) == devices_.end()) devices_.push_back(name);
  }
  for (const auto& [name, value] : fields.items()) {
    if (name == "updates" && value.is_number() && metrics_.contains(name)) {
      metrics_[name] = metrics_[name].get<int64_t>() + value.get<int64_t>();
    }
    const bool is_metric = std::ranges::find(kCommon, name) == std::end(kCommon);
    if (is_metric && !metrics_.contains(name) && !value.is_null()) metrics_[name] = value;
  }
}

Json Summary::end_fields(const char* scope, base::TimePoint started,
                         const std::optional<Cause>& cause) const {
  const auto most = [this](const char* name) {
    const auto found = most_.find(name);
    return found == most_.end() ? 0 : found->second;
  };
  const double train_s = most("train_s");
  Json fields{{"status", cause ? "failed" : "ok"},
              {"exit_code", cause ? cause->exit_code : 0},
              {"scope", scope},
              {"wall_s", rounded(base::seconds_since(started), 1e6)},
              {"train_s", most_.contains("train_s") ? Json(rounded(train_s, 1e6)) : Json()},
              {"steps", sums_["steps"]},
              {"steps_per_s", train_s > 0 ? Json(sums_["steps"].get<double>() / train_s) : Json()},
              {"rpc", rpc_},
              {"rss_mb", rounded(most("rss_mb"), 1e3)}};
  if (!devices_.empty()) {
    fields["device"] = devices_.size() == 1 ? Json(devices_.front()) : Json(devices_);
    fields["device_mem_mb"] = rounded(most("device_mem_mb"), 1e3);
  }
  fields.update(sums_);
  fields.update(metrics_);
  if (cause) {
    fields.update({{"kind", cause->kind},
                   {"message", cause->message},
                   {"cause_rank", or_null(cause->rank)},
                   {"cause_role", or_null(cause->role)},
                   {"host", or_null(cause->host)},
                   {"signal", or_null(cause->signal)},
                   {"stderr_tail", cause->stderr_tail}});
  }
  return fields;
}

}  // namespace distrain::app
