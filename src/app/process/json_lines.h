#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/job/job.h"

namespace distrain::app {

using job::Json;

/// Returns an event of the log: the common fields and `fields`.
Json json_event(std::string_view event, const std::string& run_id, const std::string& cmd,
                std::optional<int> rank, const std::string& role, const Json& fields);
/// Returns the line of an event, with its newline. Numbers that are not finite become null.
std::string line_of(const Json& event);

/// A field, if it is there and a number.
std::optional<double> number_in(const Json& fields, const std::string& name);
/// Returns a field, or an empty text if it is missing or no text.
std::string text_in(const Json& fields, const char* name);

/// Where a failed job failed first.
struct Cause {
  std::optional<int> rank;
  std::string role;
  std::string host;
  std::string signal;  ///< "SIGKILL" when it was one
  std::string kind;
  std::string message;
  std::string op;
  std::vector<std::string> stderr_tail;
  int exit_code = 1;
};

Cause cause_of(const base::Error& error);

/// Of what this process was ended by, or told to end by; `rank` is its own, if it has one.
Cause cause_by_signal(int number, std::optional<int> rank = {});

/// "rank 1 (trainer1)", or "rank 1" without a role.
std::string rank_name(int rank, const std::string& role);
/// Returns the message for people, after the name of its rank. Not named are a rank that the
/// message names, the only rank of a job, and that of a job that was stopped or has missed its
/// goal.
std::string message_of(const Cause& cause);

/// "SIGKILL" for 9.
std::string signal_name(int number);

/// The kind of a job that ran well and did not learn what it was to.
inline constexpr const char* kGoalNotReached = "goal_not_reached";

/// The fields of an `error` line.
Json error_fields(const Cause& cause, base::TimePoint started);

/// Line from a spawned rank to its launcher only: the job goes on if the rank is lost
/// (Child::may_be_lost).
inline constexpr const char* kMayBeLost = "may_be_lost";
/// Line from a spawned rank to its launcher only: a save in progress has advanced.
inline constexpr const char* kSaving = "saving";
/// Line from a spawned rank 0 to its launcher only: figures of each other rank
/// (job::Outcome::others).
inline constexpr const char* kFigures = "figures";

/// Line from a spawned rank to its launcher only: its training progress (EventSink::progress).
inline constexpr const char* kProgress = "progress";

/// Merges what the ranks say in their last lines into the fields of `end`. Ranks are added in
/// ascending order: counts are summed up, a metric is taken from the first rank that has it.
class Summary {
 public:
  void add(const Json& fields);

  /// `scope`: job or rank.
  Json end_fields(const char* scope, base::TimePoint started,
                  const std::optional<Cause>& cause) const;

 private:
  Json sums_{{"steps", 0}, {"live_rrefs", 0}, {"live_contexts", 0}};
  Json rpc_{{"calls", 0}, {"bytes_out", 0}, {"bytes_in", 0}};
  std::map<std::string, double> most_;
  std::vector<std::string> devices_;  // of all ranks, each once
  Json metrics_ = Json::object();
};

}  // namespace distrain::app
