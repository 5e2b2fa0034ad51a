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

/// The lock of a stage: one step at a time has the turn, and the steps have it in the order of the
/// stage's row of the schedule. Whoever comes early gets a future and holds no thread. Once a step
/// has failed nobody gets a turn any more: all are told the first failure. Thread-safe.
class Turns {
  struct State;

 public:
  /// The right to run one step. If it dies before done() the step has failed.
  class Turn {
   public:
    explicit Turn(std::shared_ptr<State> state) : state_(std::move(state)) {}
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    /// The next step has the turn.
    void done();
    void fail(const base::Error& error);

   private:
    std::shared_ptr<State> state_;  // null once it is over
  };
  using TurnPtr = std::shared_ptr<Turn>;

  /// The next batch. Steps of the last one that still wait fail.
  void begin(std::vector<PipelineStep> row);
  /// Done when it is the step's turn. Fails with `invalid` if it has none any more in this row.
  base::Future<TurnPtr> enter(const PipelineStep& step);
  /// Until the next begin().
  void fail(const base::Error& error) { state()->fail(error); }

 private:
  using Key = std::pair<PipelineStep::Kind, int64_t>;

  /// Of one batch. Outlives it, and Turns, as long as somebody has the turn.
  struct State : std::enable_shared_from_this<State> {
    void finish();
    void fail(const base::Error& error);

    std::mutex mutex;
    std::vector<PipelineStep> row;
    size_t next = 0;     // in the row: the step that has the turn, or will have it
    bool taken = false;  // the step at `next` has it
    std::optional<base::Error> error;
    std::map<Key, base::Promise<TurnPtr>> waiting;
  };

  std::shared_ptr<State> state() const;

  mutable std::mutex mutex_;
  std::shared_ptr<State> state_ = std::make_shared<State>();  // by mutex_
};

}  // namespace distrain::nn
