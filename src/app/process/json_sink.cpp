#include "process/json_sink.h"

#include <chrono>

#include "process/output.h"

namespace distrain::app {

std::string json_line(std::string_view event, const std::string& run_id, const std::string& cmd,
                      std::optional<int> rank, const std::string& role, const Json& fields) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  Json line{{"v", 1}, {"ts", static_cast<double>(us) / 1e6}};
  line["run"] = run_id.empty() ? Json() : Json(run_id);
  line["event"] = event;
  line["cmd"] = cmd.empty() ? Json() : Json(cmd);
  line["rank"] = rank ? Json(*rank) : Json();
  line["role"] = role.empty() ? Json() : Json(role);
  if (fields.is_object()) line.update(fields);
  // `replace`: a file name or a message need not be UTF-8.
  return line.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

void JsonSink::emit(std::string_view event, const Json& fields) {
  std::lock_guard lock(mutex_);
  if (!finished_) write_locked(event, fields);
}

void JsonSink::joined(std::string_view role, const job::OptionMap& of_rank_0) {
  std::lock_guard lock(mutex_);
  role_ = role;
  of_rank_0_ = of_rank_0;
  if (const auto id = of_rank_0.find(job::kRunId); id != of_rank_0.end()) run_id_ = id->second;
}

job::OptionMap JsonSink::of_rank_0() const {
  std::lock_guard lock(mutex_);
  return of_rank_0_;
}

bool JsonSink::finish(std::string_view event, const Json& fields) {
  std::lock_guard lock(mutex_);
  if (finished_) return false;
  finished_ = true;
  write_locked(event, fields);
  return true;
}

void JsonSink::write_locked(std::string_view event, const Json& fields) {
  if (const int error = write_all(fd_, json_line(event, run_id_, cmd_, rank_, role_, fields))) {
    on_failure_(error);
  }
}

}  // namespace distrain::app
