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

/// Runs the steps of one stage in one batch one at a time, in the order of the stage's row of the
/// schedule. An early step gets a future and holds no thread. After a step has failed, all waiting
/// and later steps fail with the first error. Thread-safe.
class Turns : public std::enable_shared_from_this<Turns> {
 public:
  /// The right to run one step. Destroying it before done() fails the step.
  class Turn {
   public:
    explicit Turn(std::shared_ptr<Turns> turns) : turns_(std::move(turns)) {}
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    void done();  ///< gives the turn to the next step
    void fail(const base::Error& error);

   private:
    std::shared_ptr<Turns> turns_;  // null after done() or fail()
  };
  using TurnPtr = std::shared_ptr<Turn>;

  explicit Turns(std::vector<PipelineStep> row) : row_(std::move(row)) {}

  /// Waits for the step's turn. Fails with `invalid` if the step is not left in the row or waits.
  base::Future<TurnPtr> enter(PipelineStep::Kind kind, int64_t micro_batch);
  /// Fails the waiting and all later steps.
  void fail(const base::Error& error);

 private:
  using Key = std::pair<PipelineStep::Kind, int64_t>;
  static Key key_of(const PipelineStep& step) { return {step.kind, step.micro_batch}; }
  void finish();

  std::mutex mutex_;
  const std::vector<PipelineStep> row_;
  size_t next_ = 0;     // index in `row_` of the step that has the turn or gets it next
  bool taken_ = false;  // true while the step at `next_` has the turn
  std::optional<base::Error> error_;
  std::map<Key, base::Promise<TurnPtr>> waiting_;
};

}  // namespace distrain::nn
