#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/data/named_tensors.h"
#include "distrain/job/training.h"
#include "distrain/scenario/pipeline.h"
#include "loss.h"

namespace distrain::scenario {

/// The model under training and its optimizer, wherever the stages are.
class PipelineModel {
 public:
  virtual ~PipelineModel() = default;
  /// A fresh one, for batches that are cut into so many micro-batches.
  virtual void begin(int64_t num_split) = 0;
  /// One update; `index` is the batch's number, from 0.
  virtual BatchResult train(const PipelineBatch& batch, int64_t index) = 0;
  /// [n, classes] of images, by the statistics that batch norm has gathered.
  virtual at::Tensor scores(const at::Tensor& images) = 0;
  virtual void set_lr_factor(double factor) = 0;
  /// Parameters and buffers by torchvision's names.
  virtual data::NamedTensors state() = 0;
  /// A whole state, checked before.
  virtual void load(const data::NamedTensors& state) = 0;
};

/// What is read before anything begins. Throws `bad_data`.
struct PipelineInputs {
  explicit PipelineInputs(const PipelineOptions& options);

  PipelineData images;
  data::NamedTensors weights;  ///< to begin with; empty: as the model begins by itself
};

/// The training as the job's first rank sees it, the same over ranks and in one process: each
/// number of micro-batches in turn with a fresh model, and the lines that tell of it.
class PipelineRun {
 public:
  /// Begins the first model.
  PipelineRun(const PipelineOptions& options, const PipelineInputs& inputs, PipelineModel& model,
              job::EventSink& sink);

  job::Plan plan() const;
  /// What a checkpoint keeps of the model, and how it is evaluated.
  void keep_in(job::TrainingPlan& training);
  job::Result step(const job::Step& step);
  /// Ends the last split. For `end`.
  void add_to(job::Json& fields);

 private:
  int64_t batches() const;  // of each run
  void begin(int64_t num_split);
  void log(const BatchResult& result, int64_t epoch, int64_t step);
  void end_split();
  job::Evaluation evaluate(const job::Share& share);

  const PipelineOptions& options_;
  const PipelineInputs& inputs_;
  PipelineModel& model_;
  job::EventSink& sink_;
  const optim::Schedule lr_schedule_;
  int64_t steps_ = 0;
  base::TimePoint begun_;
  double train_s_ = 0;
  // Of the split under way.
  std::optional<size_t> split_;
  base::TimePoint split_begun_;
  std::vector<BatchResult> results_;
  job::Json last_, best_;  // of the splits before
};

}  // namespace distrain::scenario
