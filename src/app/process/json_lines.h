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

inline Json or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }
template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

/// Returns an event as JSON: the fields that all events have, and `fields`.
Json json_event(std::string_view event, const std::string& run_id, const std::string& cmd,
                std::optional<int> rank, const std::string& role, const Json& fields);
/// Returns the event as a line of JSON, with newline. Numbers that are not finite become null.
std::string line_of(const Json& event);

// Return the field `name`, or nothing if it is missing or has another type.
std::optional<double> number_in(const Json& fields, const std::string& name);
std::string text_in(const Json& fields, const char* name);

/// The root cause of a failed job.
struct Cause {
  std::optional<int> rank;
  std::string role;
  std::string host;
  std::string signal;  ///< such as "SIGKILL"; empty if no signal ended the rank
  std::string kind;
  std::string message;
  std::string op;
  std::vector<std::string> stderr_tail;
  int exit_code = 1;
};

Cause cause_of(const base::Error& error);
/// Returns the cause if signal `number` ends this process. `rank`: this process's, if it has one.
Cause cause_by_signal(int number, std::optional<int> rank = {});

/// Returns "rank 1 (trainer1)", or "rank 1" if `role` is empty.
std::string rank_name(int rank, const std::string& role);
/// Returns the message for a person. It begins with the name of the rank unless it contains the
/// rank, the job has one rank (`local`), a signal ended the job, or the job missed its goal.
std::string message_of(const Cause& cause);

std::string signal_name(int number);  ///< "SIGKILL" for 9

/// The error kind of a job that ran without errors but missed its training goal.
inline constexpr const char* kGoalNotReached = "goal_not_reached";

Json error_fields(const Cause& cause, base::TimePoint started);

// Lines from a spawned rank to its launcher only.
inline constexpr const char* kMayBeLost = "may_be_lost";  ///< the job goes on if the rank is lost
inline constexpr const char* kSaving = "saving";          ///< a save in progress has advanced
inline constexpr const char* kFigures = "figures";        ///< from rank 0: job::Outcome::others
inline constexpr const char* kProgress = "progress";      ///< EventSink::progress()

/// Merges the fields of the ranks' last lines into the fields of `end`. Add ranks in ascending
/// order: counts are summed, and a metric is taken from the first rank that has it.
class Summary {
 public:
  void add(const Json& fields);

  /// Returns the fields of `end`. `scope` is job or rank; `cause` is empty if the job succeeded.
  Json end_fields(const char* scope, base::TimePoint started,
                  const std::optional<Cause>& cause) const;

 private:
  Json sums_{{"steps", 0}, {"live_rrefs", 0}, {"live_contexts", 0}};
  Json rpc_{{"calls", 0}, {"bytes_out", 0}, {"bytes_in", 0}};
  std::map<std::string, double> most_;
  std::vector<std::string> devices_;  // of all ranks, without duplicates
  Json metrics_ = Json::object();
};

}  // namespace distrain::app
