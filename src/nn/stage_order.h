#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/base/future.h"
#include "distrain/nn/pipeline.h"

namespace distrain::nn {

/// Admits the steps of one stage in one batch one at a time, in the order of the stage's row of the
/// schedule. An early step gets a future and holds no thread. After a step has failed, all waiting
/// and later steps fail with the first error. Thread-safe.
class StageOrder : public std::enable_shared_from_this<StageOrder> {
 public:
  /// The right to run one step. Destroying it before done() fails the step.
  class Admission {
   public:
    explicit Admission(std::shared_ptr<StageOrder> order) : order_(std::move(order)) {}
    ~Admission() { fail({base::ErrorKind::kCancelled, "a step of this stage was abandoned"}); }
    Admission(const Admission&) = delete;
    Admission& operator=(const Admission&) = delete;
    /// Admits the next step.
    void done() { std::exchange(order_, nullptr)->finish(); }
    void fail(const base::Error& error) {
      if (const auto order = std::exchange(order_, nullptr)) order->fail(error);
    }

   private:
    std::shared_ptr<StageOrder> order_;  // null after done() or fail()
  };
  using AdmissionPtr = std::shared_ptr<Admission>;

  explicit StageOrder(std::vector<PipelineStep> row) : row_(std::move(row)) {}

  /// Returns a future that completes when all earlier steps of the row have ended. The future fails
  /// with `invalid` if the row has no such step left or the step is waiting already.
  base::Future<AdmissionPtr> admit(PipelineStep::Kind kind, int64_t micro_batch);
  /// Fails all waiting steps and all later ones.
  void fail(const base::Error& error);

 private:
  using Key = std::pair<PipelineStep::Kind, int64_t>;
  static Key key_of(const PipelineStep& step) { return {step.kind, step.micro_batch}; }
  void finish();

  std::mutex mutex_;
  const std::vector<PipelineStep> row_;
  size_t next_ = 0;  // index in `row_` of the step that is admitted, or the next one to admit
  bool is_admitted_ = false;  // true while the step at `next_` runs
  std::optional<base::Error> error_;
  std::map<Key, base::Promise<AdmissionPtr>> waiting_;
};

}  // namespace distrain::nn
