#pragma once

#include <limits>
#include <map>
#include <set>
#include <unordered_map>

#include "distrain/job/job.h"

namespace distrain::app {

using job::Json;

/// Returns `value` as ASCII text in one line.
inline std::string in_one_line(const Json& value) {
  return value.dump(-1, ' ', true, Json::error_handler_t::replace);
}

/// Calls `take` with each line of `path`, which may be compressed with gzip; "-" is standard input.
/// Lines are truncated after 4 MiB, so that a file without line ends cannot exhaust the memory.
/// Throws `bad_data` if the file cannot be read.
void for_each_line(const std::string& path, const std::function<void(const std::string&)>& take);

/// Lines of one event from one rank, as columns of numbers. A missing number is NaN.
class LogTable {
 public:
  void add(const Json& line);
  /// Returns the number of lines, and the columns with about `most` rows: the first, the last,
  /// those with the smallest and the largest number of each column, and of the loss or reward in
  /// each of `most / 2` ranges. Times are in seconds since `begin`.
  Json to_json(size_t most, double begin) const;

 private:
  std::set<size_t> pick(size_t most) const;

  size_t lines_ = 0;
  std::map<std::string, std::vector<double>> columns_;
};

/// The lines of one run, from all of its ranks.
struct LoggedRun {
  std::string id;  ///< empty if the ranks never met
  std::string cmd;
  std::set<std::string> files;
  double begin = std::numeric_limits<double>::infinity();  ///< time of the earliest line
  double end = 0;                                          ///< time of the latest line
  Json config = Json::object();  ///< options as the lowest rank knows them
  double config_rank = std::numeric_limits<double>::infinity();
  std::vector<Json> events;                ///< the other lines, shortened, in order of time
  std::map<std::string, size_t> counts;    ///< lines of each event, without those in `tables`
  size_t hidden_events = 0;                ///< lines that are left out, because there are too many
  std::map<std::string, LogTable> tables;  ///< by event, rank, …, as a JSON object

  void add(const Json& line, const std::string& file);
};

struct RunLog {
  std::vector<LoggedRun> runs;
  size_t skipped = 0;  ///< lines that are truncated, not JSON, not ours, or of too many runs
  size_t files = 0;    ///< number of files that were read
  std::unordered_map<size_t, size_t> seen;  ///< hash of run, rank, event and time -> file

  /// Reads the lines of a file, except those that an earlier file has too. Throws `bad_data` if it
  /// has none of distrain's.
  void read(const std::string& path);
};

/// Returns how the run ended: `state` (ok, failed, stopped, missed or open), `title`, which has the
/// root cause of a failure, and `details`, a list of sentences.
Json verdict_of(const LoggedRun& run);

/// Returns a row for each name and rank in a file of `--trace`: name, role, number of events, and
/// their time in ms, with and without the events inside them. Throws `bad_data` if there is none.
Json trace_summary(const std::string& path);

}  // namespace distrain::app
