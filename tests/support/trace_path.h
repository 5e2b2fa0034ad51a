#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>
#include <unistd.h>

namespace distrain::testing {

/// A path for a trace file; the destructor removes the file.
class TracePath {
 public:
  TracePath()
      : path_(std::filesystem::temp_directory_path() /
              ("distrain_trace_" + std::to_string(getpid()) + ".json")) {}
  ~TracePath() { std::filesystem::remove(path_); }
  std::string text() const { return path_.string(); }
  bool exists() const { return std::filesystem::exists(path_); }
  nlohmann::ordered_json read() const {
    return nlohmann::ordered_json::parse(std::ifstream(path_));
  }

 private:
  std::filesystem::path path_;
};

}  // namespace distrain::testing
