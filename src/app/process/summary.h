#pragma once

#include <optional>
#include <string>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/job/job.h"

namespace distrain::app {

using job::Json;

/// Where a failed job failed first.
struct Cause {
  std::optional<int> rank;
  std::string role;
  std::string host;
  std::string signal;  ///< "SIGKILL" when it was one
  std::string kind;
  std::string message;
  std::vector<std::string> stderr_tail;
  int exit_code = 1;
};

/// Merges what the ranks say in their last lines into the fields of `end`. Ranks are added in
/// ascending order: a metric is taken from the first one that has it.
class Summary {
 public:
  void add(const Json& fields);
  void add_rss(double mb);

  Json end_fields(int exit_code, double wall_s, const std::optional<Cause>& cause) const;

 private:
  std::optional<double> train_s_;
  int64_t steps_ = 0;
  int64_t rpc_calls_ = 0;
  int64_t rpc_bytes_out_ = 0;
  int64_t rpc_bytes_in_ = 0;
  double rss_mb_ = 0;
  std::vector<std::string> devices_;  // of all ranks, each once
  double device_mem_mb_ = 0;
  int64_t live_rrefs_ = 0;
  int64_t live_contexts_ = 0;
  Json metrics_ = Json::object();
};

/// Adds what the job was started with to the fields of `end`.
void tell_config(const Json& config, Json& fields);

/// The fields of an `error` line.
Json error_fields(const base::Error& error, double elapsed_s);

/// What an error looks like as the cause in `end`.
Cause cause_of(const base::Error& error);

/// Of what this process was ended by, or told to end by; `rank` is its own, if it has one.
Cause cause_by_signal(int number, std::optional<int> rank = {});

/// "SIGKILL" for 9.
std::string signal_name(int number);

}  // namespace distrain::app
