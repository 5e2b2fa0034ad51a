#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/job/job.h"
#include "distrain/scenario/pipeline.h"

namespace distrain::scenario {

/// What came of one batch.
struct BatchResult {
  double loss = 0;
  std::optional<double> accuracy;  ///< where there are labels to hit: not with random data
  double batch_s = 0;              ///< passes and update, to the end of what devices do
  /// Each stage's own computing time; none where a device computes.
  std::vector<std::optional<double>> stage_s;
  std::vector<int64_t> activations;  ///< micro-batches that each stage held at most
};

/// Emits the `step` and `split` lines of `distrain pipeline`, and counts for `end`.
class SplitLog {
 public:
  SplitLog(const PipelineOptions& options, job::EventSink& sink) : options_(options), sink_(sink) {}

  void begin_split(int64_t num_split);
  /// `step`: the batch's number in the run, from 1.
  void batch(const BatchResult& result, int64_t epoch, int64_t step);
  /// Emits nothing if there was no batch.
  void end_split();

  void add_to(job::Json& fields) const;

 private:
  const PipelineOptions options_;
  job::EventSink& sink_;
  std::optional<base::TimePoint> first_;
  double train_s_ = 0;
  int64_t steps_ = 0;
  // Of the split under way.
  int64_t num_split_ = 0;
  base::TimePoint begun_;
  std::vector<BatchResult> results_;
  job::Json last_;
  job::Json best_;
};

}  // namespace distrain::scenario
