#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/base/future.h"
#include "distrain/nn/pipeline_schedule.h"

namespace distrain::nn {

/// The lock of a stage for one batch: one step at a time has the turn, and the steps have it in the
/// order of the stage's row of the schedule. Whoever comes early gets a future and holds no thread.
/// Once a step has failed nobody gets a turn any more: all are told the first failure. Thread-safe.
class Turns : public std::enable_shared_from_this<Turns> {
 public:
  /// The right to run one step. If it dies before done() the step has failed.
  class Turn {
   public:
    explicit Turn(std::shared_ptr<Turns> turns) : turns_(std::move(turns)) {}
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    /// The next step has the turn.
    void done();
    void fail(const base::Error& error);

   private:
    std::shared_ptr<Turns> turns_;  // null once it is over
  };
  using TurnPtr = std::shared_ptr<Turn>;

  explicit Turns(std::vector<PipelineStep> row) : row_(std::move(row)) {}

  /// Done at the step's turn. `invalid` if the row has no such step left, or it waits already.
  base::Future<TurnPtr> enter(PipelineStep::Kind kind, int64_t micro_batch);
  /// Fails the steps that wait, and those that come.
  void fail(const base::Error& error);

 private:
  using Key = std::pair<PipelineStep::Kind, int64_t>;
  static Key key_of(const PipelineStep& step) { return {step.kind, step.micro_batch}; }
  void finish();

  std::mutex mutex_;
  const std::vector<PipelineStep> row_;
  size_t next_ = 0;     // in the row: the step that has the turn, or will have it
  bool taken_ = false;  // the step at `next_` has it
  std::optional<base::Error> error_;
  std::map<Key, base::Promise<TurnPtr>> waiting_;
};

}  // namespace distrain::nn
