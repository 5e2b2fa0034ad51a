#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "distrain/base/future.h"
#include "pipeline_schedule.h"

namespace distrain::scenario {

/// The lock of a stage: one step at a time has the turn, and the steps have it in the order of the
/// stage's row of the schedule. Whoever comes early gets a future and holds no thread. Thread-safe.
class Turns {
 public:
  /// The right to run one step. If it dies before done() the step has failed: then nobody gets a
  /// turn any more.
  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(&turns) {}
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    /// The next step has the turn.
    void done();

   private:
    Turns* turns_;
  };
  using TurnPtr = std::shared_ptr<Turn>;

  /// Steps of another row that wait, because that batch has failed, fail.
  void begin(std::vector<PipelineStep> row);
  /// Done when it is the step's turn. Fails with `invalid` if it has none any more in this row.
  base::Future<TurnPtr> enter(const PipelineStep& step);

 private:
  using Key = std::pair<PipelineStep::Kind, int64_t>;

  void finish(bool well);
  void fail_waiting(const base::Error& error);

  std::mutex mutex_;
  std::vector<PipelineStep> row_;
  size_t next_ = 0;      // in the row: the step that has the turn, or will have it
  bool taken_ = false;   // the step at next_ has it
  bool failed_ = false;  // until the next row
  std::map<Key, base::Promise<TurnPtr>> waiting_;
};

}  // namespace distrain::scenario
