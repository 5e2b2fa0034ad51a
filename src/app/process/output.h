#pragma once

#include <algorithm>
#include <chrono>
#include <deque>

#include "distrain/job/job.h"
#include "distrain/net/socket.h"

namespace distrain::app {

/// Writes all of `text`, in one write(2) if the kernel accepts it. May block. Returns 0 or errno.
int write_all(int fd, std::string_view text);
/// Returns true if a write to `fd` would not block: it would accept some bytes or fail.
bool is_writable(int fd);
/// Prints the line "PROGRAM: `message`" to stderr. Ignores errors.
void say(std::string_view message);
/// Returns the exit code after a write to stdout failed with errno `error`: 141 if the reader has
/// closed the pipe, otherwise 9. If `say_so`, reports errors other than a closed pipe on stderr.
int exit_code_of_write_error(int error, bool say_so = true);

/// How long a process that a signal ends waits for stdout's reader, which may have stopped reading.
inline constexpr auto kReaderGrace = std::chrono::seconds(2);
/// How long after a write to a closed terminal (EIO) to wait for SIGHUP.
inline constexpr auto kHangUp = std::chrono::seconds(2);

/// Queues lines, so that a slow reader does not block the writing thread, which also handles
/// signals. The descriptor stays in blocking mode, because it may be shared with a shell. So writes
/// to a pipe are no larger than what the pipe accepts without blocking.
class OutputQueue {
 public:
  explicit OutputQueue(int fd);

  void push(std::string line) {
    bytes_ += line.size();
    lines_.push_back(std::move(line));
  }
  bool empty() const { return lines_.empty(); }
  /// Returns true if the queue is above its limit: push nothing before pump() has written lines.
  bool full() const { return bytes_ > kMaxBytes; }
  /// Returns when to give up on the reader: kReaderGrace after `since`, or after a later write.
  base::TimePoint given_up_at(base::TimePoint since) const {
    return std::max(since, taken_at_) + kReaderGrace;
  }
  int fd() const { return fd_; }

  /// Writes lines while the descriptor is writable. Returns 0 or errno.
  int pump();
  void clear() {
    lines_.clear();
    bytes_ = written_ = 0;
  }

 private:
  static constexpr size_t kMaxBytes = 1 << 20;

  int fd_;
  size_t pipe_ = 0;     // the pipe's capacity in bytes; 0 if fd_ is no pipe
  size_t written_ = 0;  // bytes of the first line that are written already
  size_t bytes_ = 0;
  base::TimePoint taken_at_{};  // time of the last successful write
  std::deque<std::string> lines_;
};

/// The file of --log, to which JSON lines are appended. A line that cannot be written is dropped,
/// so that the file has whole lines only and the job goes on. Not thread-safe.
class LogFile {
 public:
  /// Opens the file; creates missing parent folders. Does nothing if `path` is empty. Throws
  /// `invalid` if `path` is a pipe or standard output's file, or cannot be opened.
  void open(const std::string& path);
  /// Appends `line`. Returns the fields of a `warn` line if this is the first failure, else null.
  job::Json write(std::string_view line);

 private:
  std::string path_;
  net::Fd fd_;
  bool has_failed_ = false;
};

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

// Return the field `name`; nullopt or an empty text if it is missing or has another type.
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
/// Returns the cause for a process that signal `number` ended; `rank` is its rank, if known.
Cause cause_by_signal(int number, std::optional<int> rank = {});

/// Returns "rank 1 (trainer1)", or "rank 1" if `role` is empty.
std::string rank_name(int rank, const std::string& role);
/// Returns the cause's message, with the failed rank's name in front unless the message has the
/// name, the job has one rank (`local`), a signal ended the job, or the job missed its goal.
std::string message_of(const Cause& cause);

std::string signal_name(int number);  ///< "SIGKILL" for 9

/// The error kind of a job that ran without errors but missed its training goal.
inline constexpr const char* kGoalNotReached = "goal_not_reached";

Json error_fields(const Cause& cause, base::TimePoint started);

// Events that spawned ranks send to their launcher, which does not write them to stdout.
inline constexpr const char* kMayBeLost = "may_be_lost";  ///< the job goes on if the rank is lost
inline constexpr const char* kSaving = "saving";          ///< a save in progress has advanced
inline constexpr const char* kFigures = "figures";        ///< rank 0's job::Outcome::others
inline constexpr const char* kProgress = "progress";      ///< the fields of EventSink::progress()

/// Merges the fields of the ranks' last lines into the fields of the job's `end` line: sums counts,
/// and takes a metric from the first rank that has it. So add the ranks in ascending order.
class Summary {
 public:
  void add(const Json& fields);

  /// Returns the fields of `end`. `scope` is job or rank; `cause` is empty if the job succeeded.
  Json end_fields(const char* scope, base::TimePoint started,
                  const std::optional<Cause>& cause) const;

 private:
  Json sums_{{"steps", 0}, {"live_rrefs", 0}, {"live_contexts", 0}};
  Json rpc_{{"calls", 0}, {"bytes_out", 0}, {"bytes_in", 0}};
  std::map<std::string, double> most_;  // the largest values; of cpu_s the sum
  std::vector<std::string> devices_;    // of all ranks, without duplicates
  Json metrics_ = Json::object();
};

}  // namespace distrain::app
