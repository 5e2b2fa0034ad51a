#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data.h"
#include "distrain/base/clock.h"
#include "distrain/data/named_tensors.h"
#include "distrain/job/training.h"
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

/// What a micro-batch adds to the loss of its batch of `batch_size`: the sum over all micro-batches
/// is the mean over the batch, and so are the gradients. `scores` [n, classes], on any device.
at::Tensor loss_share(const PipelineOptions& options, const at::Tensor& scores,
                      const at::Tensor& labels);

/// Loss and accuracy of a whole batch. Throws `not_finite`, naming the batch (from 0).
BatchResult judge(const PipelineOptions& options, const std::vector<at::Tensor>& scores,
                  const data::ImageBatch& batch, int64_t index);

/// The model under training and its optimizer, wherever the stages are.
class PipelineModel {
 public:
  virtual ~PipelineModel() = default;
  /// A fresh one, for batches that are cut into so many micro-batches.
  virtual void begin(int64_t num_split) = 0;
  /// One update; `index` is the batch's number, from 0. It is cut as tensor_split cuts: sizes
  /// differ by one at most, larger ones first.
  virtual BatchResult train(const data::ImageBatch& batch, int64_t index) = 0;
  /// [n, classes] of images, by the statistics that batch norm has gathered.
  virtual at::Tensor scores(const at::Tensor& images) = 0;
  virtual void set_lr_factor(double factor) = 0;
  /// Parameters and buffers as they are now, by torchvision's names.
  virtual job::Held state() = 0;
  /// A whole state, checked before.
  virtual void load(const data::NamedTensors& state) = 0;
};

/// The training as the job's first rank sees it, the same over ranks and in one process: each
/// number of micro-batches in turn with a fresh model, and the lines that tell of it.
class PipelineRun {
 public:
  /// Begins the first model.
  PipelineRun(const PipelineOptions& options, const PipelineData& data, PipelineModel& model,
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
  void end_split();

  const PipelineOptions& options_;
  const PipelineData& data_;
  PipelineModel& model_;
  job::EventSink& sink_;
  job::StepLines lines_;
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

/// The schedule for each number of micro-batches. As JSON, a line each: stages with their blocks,
/// each step with the time it begins at if all take one unit, the share of waiting. For people: a
/// timeline. Throws `invalid` for options that do not go together.
std::string explain_pipeline(const PipelineOptions& options, bool for_people);

/// What the master does.
void train_pipeline(job::Rank& rank, const PipelineOptions& options);
/// The same training in one process without RPC: the reference for correctness and speed.
void train_pipeline_local(job::Local& local, const PipelineOptions& options);
/// Classifies images with the model of a checkpoint.
void predict_pipeline(job::Predictions& predictions, const PipelineOptions& options);

}  // namespace distrain::scenario
