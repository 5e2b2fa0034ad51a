#include "process/summary.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>
#include <string.h>

#include "process/process_setup.h"

namespace distrain::app {
namespace {

int64_t count(const Json& fields, const char* name) {
  const auto it = fields.find(name);
  return it != fields.end() && it->is_number() ? it->get<int64_t>() : 0;
}

/// Fields of a rank's last line that are not metrics of the job.
bool is_common(const std::string& name) {
  static const std::set<std::string> kCommon = {
      "v",       "ts",         "run",           "seed",    "config",       "event",
      "cmd",     "rank",       "role",          "status",  "wall_s",       "exit_code",
      "train_s", "steps",      "steps_per_s",   "rpc",     "rss_mb",       "kind",
      "signal",  "live_rrefs", "live_contexts", "message", "host",         "cause_rank",
      "op",      "cause_role", "stderr_tail",   "device",  "device_mem_mb"};
  return kCommon.contains(name);
}

double rounded(double value, double parts) { return std::round(value * parts) / parts; }

}  // namespace

void Summary::add(const Json& fields) {
  if (const auto it = fields.find("train_s"); it != fields.end() && it->is_number()) {
    train_s_ = std::max(train_s_.value_or(0), it->get<double>());
  }
  steps_ += count(fields, "steps");
  if (const auto rpc = fields.find("rpc"); rpc != fields.end() && rpc->is_object()) {
    rpc_calls_ += count(*rpc, "calls");
    rpc_bytes_out_ += count(*rpc, "bytes_out");
    rpc_bytes_in_ += count(*rpc, "bytes_in");
  }
  if (const auto it = fields.find("rss_mb"); it != fields.end() && it->is_number()) {
    add_rss(it->get<double>());
  }
  if (const auto it = fields.find("device"); it != fields.end()) {
    for (const Json& device : it->is_array() ? *it : Json::array({*it})) {
      if (!device.is_string()) continue;
      const auto& name = device.get_ref<const std::string&>();
      if (std::find(devices_.begin(), devices_.end(), name) == devices_.end()) {
        devices_.push_back(name);
      }
    }
  }
  if (const auto it = fields.find("device_mem_mb"); it != fields.end() && it->is_number()) {
    device_mem_mb_ = std::max(device_mem_mb_, it->get<double>());
  }
  live_rrefs_ += count(fields, "live_rrefs");
  live_contexts_ += count(fields, "live_contexts");
  for (const auto& [name, value] : fields.items()) {
    if (!is_common(name) && !metrics_.contains(name) && !value.is_null()) metrics_[name] = value;
  }
}

void Summary::add_rss(double mb) { rss_mb_ = std::max(rss_mb_, mb); }

Json Summary::end_fields(int exit_code, double wall_s, const std::optional<Cause>& cause) const {
  Json fields{{"status", exit_code == 0 ? "ok" : "failed"},
              {"exit_code", exit_code},
              {"wall_s", rounded(wall_s, 1e6)}};
  fields["train_s"] = train_s_ ? Json(rounded(*train_s_, 1e6)) : Json();
  fields["steps"] = steps_;
  fields["steps_per_s"] =
      train_s_.value_or(0) > 0 ? Json(static_cast<double>(steps_) / *train_s_) : Json();
  fields["rpc"] = {
      {"calls", rpc_calls_}, {"bytes_out", rpc_bytes_out_}, {"bytes_in", rpc_bytes_in_}};
  fields["rss_mb"] = rounded(rss_mb_, 1e3);
  if (!devices_.empty()) {
    fields["device"] = devices_.size() == 1 ? Json(devices_.front()) : Json(devices_);
    fields["device_mem_mb"] = rounded(device_mem_mb_, 1e3);
  }
  fields["live_rrefs"] = live_rrefs_;
  fields["live_contexts"] = live_contexts_;
  fields.update(metrics_);
  if (cause) {
    fields["kind"] = cause->kind;
    fields["message"] = cause->message;
    fields["cause_rank"] = cause->rank ? Json(*cause->rank) : Json();
    fields["cause_role"] = cause->role.empty() ? Json() : Json(cause->role);
    fields["host"] = cause->host.empty() ? Json() : Json(cause->host);
    fields["signal"] = cause->signal.empty() ? Json() : Json(cause->signal);
    fields["stderr_tail"] = cause->stderr_tail;
  }
  return fields;
}

void tell_config(const Json& config, Json& fields) {
  fields["seed"] = config.value("seed", Json());
  fields["config"] = config;
}

Json error_fields(const base::Error& error, double elapsed_s) {
  return Json{{"kind", base::kind_name(error.kind)},
              {"message", error.message},
              {"cause_rank", error.rank >= 0 ? Json(error.rank) : Json()},
              {"op", error.op.empty() ? Json() : Json(error.op)},
              {"elapsed_s", rounded(elapsed_s, 1e6)},
              {"exit_code", base::exit_code(error.kind)}};
}

Cause cause_of(const base::Error& error) {
  return {.rank = error.rank >= 0 ? std::optional(error.rank) : std::nullopt,
          .kind = std::string(base::kind_name(error.kind)),
          .message = error.message,
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

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

}  // namespace distrain::app
