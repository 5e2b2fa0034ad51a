#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "data.h"
#include "distrain/data/named_tensors.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/job.h"
#include "distrain/scenario/pipeline.h"
#include "split_log.h"

namespace distrain::scenario {

/// The model under training, wherever its stages are.
class PipelineModel {
 public:
  virtual ~PipelineModel() = default;
  /// One update; `index` is the batch's number, from 0.
  virtual BatchResult train(const PipelineBatch& batch, int64_t index) = 0;
  /// Parameters and buffers by torchvision's names.
  virtual data::NamedTensors state() = 0;
  /// A whole state, checked before.
  virtual void load(const data::NamedTensors& state) = 0;
};

/// The job as its first rank sees it, the same over ranks and in one process: each number of
/// micro-batches in turn with a fresh model, its lines, and its checkpoints.
class PipelineRun {
 public:
  using MakeModel = std::function<std::unique_ptr<PipelineModel>(int64_t num_split)>;

  PipelineRun(const PipelineOptions& options, const job::Job& job, job::EventSink& sink);

  void run(const MakeModel& make);
  /// The job was told to stop, on this rank or, by stop(), on another one.
  bool stopped() const { return stopped_; }
  void stop() {
    stopped_ = true;
    stop_->disarm(true);
  }
  void add_to(job::Outcome& outcome) const;

 private:
  void run_split(int64_t num_split, PipelineModel& model);
  job::Json must_agree() const;
  /// The batch to go on with.
  int64_t resume(const job::Snapshot& snapshot, PipelineModel& model) const;
  void save(int64_t batches, PipelineModel& model);

  const PipelineOptions options_;
  const std::shared_ptr<job::StopSignal> stop_;
  const PipelineData data_;
  const data::NamedTensors weights_;  // to begin with; empty: as the model begins by itself
  job::Checkpoints checkpoints_;
  SplitLog log_;
  bool stopped_ = false;
};

}  // namespace distrain::scenario
