#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "distrain/job/job.h"

namespace distrain::app {

using job::Json;

/// One line of the log, with its newline. Numbers that are not finite become null.
std::string json_line(std::string_view event, const std::string& cmd, std::optional<int> rank,
                      const std::string& role, const Json& fields);

/// A rank's JSON lines. Thread-safe; each line is one write.
class JsonSink final : public job::EventSink {
 public:
  /// `on_failure` gets the errno of a failed write; where it returns, the line is lost.
  JsonSink(int fd, std::string cmd, int rank, std::string role, std::function<void(int)> on_failure)
      : fd_(fd),
        cmd_(std::move(cmd)),
        rank_(rank),
        on_failure_(std::move(on_failure)),
        role_(std::move(role)) {}

  void emit(std::string_view event, const Json& fields) override;
  void set_role(std::string_view role) override;

  /// The last line: whatever another thread emits afterwards is dropped. False when there was a
  /// last line before.
  bool finish(std::string_view event, const Json& fields);

 private:
  void write_locked(std::string_view event, const Json& fields);

  const int fd_;
  const std::string cmd_;
  const int rank_;
  const std::function<void(int)> on_failure_;
  std::mutex mutex_;
  std::string role_;
  bool finished_ = false;
};

}  // namespace distrain::app
