#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "distrain/job/job.h"

namespace distrain::app {

using job::Json;

/// True when stderr is a terminal and nobody reads stdout as we go: it is a file or /dev/null.
bool wants_progress();

/// One status line on stderr, rewritten as `step`, `epoch`, `episode` and `eval` lines come
/// by.
class Progress {
 public:
  /// `epochs`: of the whole job, for "epoch 3/15".
  Progress(bool enabled, int epochs);

  void on_line(const std::string& line);
  /// Takes the status line away, so that other text can be written.
  void clear();
  void finish(const Json& end);

 private:
  void show(bool at_once);

  const bool enabled_;
  const bool colour_;
  const int epochs_;
  int epoch_ = 0;
  int64_t episode_ = 0;
  std::optional<double> loss_;
  std::string quality_;
  bool ready_ = false;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace distrain::app
