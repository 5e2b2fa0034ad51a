#include "process/json_sink.h"

#include <chrono>

#include "process/output.h"

namespace distrain::app {

std::string json_line(std::string_view event, const std::string& cmd, std::optional<int> rank,
                      const std::string& role, const Json& fields) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  Json line{{"v", 1}, {"ts", static_cast<double>(us) / 1e6}, {"event", event}};
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

void JsonSink::set_role(std::string_view role) {
  std::lock_guard lock(mutex_);
  role_ = role;
}

bool JsonSink::finish(std::string_view event, const Json& fields) {
  std::lock_guard lock(mutex_);
  if (finished_) return false;
  finished_ = true;
  write_locked(event, fields);
  return true;
}

void JsonSink::write_locked(std::string_view event, const Json& fields) {
  if (const int error = write_all(fd_, json_line(event, cmd_, rank_, role_, fields))) {
    on_failure_(error);
  }
}

}  // namespace distrain::app
