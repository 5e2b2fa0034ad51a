#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "distrain/job/job.h"

namespace distrain::job {

/// Decides which steps of a run print a line, as `--log-interval` says: every Nth step or, by time,
/// the first step, the last one, and at most one step every 5 s between them.
///
///   StepLines lines(sink, "step", options.log_interval);
///   lines.add(number, [loss] { return Json{{"loss", loss}}; });  // after each step
///   lines.end();
class StepLines {
 public:
  /// `event`: the kind of the lines. `interval`: steps from one line to the next, 0 for no lines;
  /// by time if unset.
  StepLines(EventSink& sink, std::string event, std::optional<int> interval)
      : sink_(sink), event_(std::move(event)), interval_(interval) {}

  /// Emits the line of step `number`, counted from 1, and returns true if the line is due.
  /// Otherwise keeps `fields` for end(), because the step may be the last one.
  bool add(int64_t number, std::function<Json()> fields);
  /// Ends the run: emits the line of the last step if the step has none yet. Another run may
  /// follow.
  void end();

 private:
  EventSink& sink_;
  const std::string event_;
  const std::optional<int> interval_;
  base::TimePoint next_{};         // by time: when the next line is due
  std::function<Json()> pending_;  // by time: the fields of the last step if it has no line
};

}  // namespace distrain::job
