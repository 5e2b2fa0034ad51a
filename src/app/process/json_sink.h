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
std::string json_line(std::string_view event, const std::string& run_id, const std::string& cmd,
                      std::optional<int> rank, const std::string& role, const Json& fields);

/// A rank's JSON lines. Thread-safe; each line is one write.
class JsonSink final : public job::EventSink {
 public:
  /// `on_failure` gets the errno of a failed write; where it returns, the line is lost.
  JsonSink(int fd, std::string run_id, std::string cmd, int rank, std::string role,
           std::function<void(int)> on_failure)
      : fd_(fd),
        cmd_(std::move(cmd)),
        rank_(rank),
        on_failure_(std::move(on_failure)),
        run_id_(std::move(run_id)),
        role_(std::move(role)) {}

  void emit(std::string_view event, const Json& fields) override;
  void joined(std::string_view role, const job::OptionMap& of_rank_0) override;
  /// What rank 0 has told; empty before.
  job::OptionMap of_rank_0() const;

  /// The last line: whatever another thread emits afterwards is dropped. False when there was a
  /// last line before.
  bool finish(std::string_view event, const Json& fields);

 private:
  void write_locked(std::string_view event, const Json& fields);

  const int fd_;
  const std::string cmd_;
  const int rank_;
  const std::function<void(int)> on_failure_;
  mutable std::mutex mutex_;
  std::string run_id_;
  std::string role_;
  job::OptionMap of_rank_0_;
  bool finished_ = false;
};

}  // namespace distrain::app
