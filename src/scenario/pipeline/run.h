#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data.h"
#include "distrain/base/clock.h"
#include "distrain/job/training.h"
#include "distrain/rpc/named_tensors.h"
#include "options.h"

namespace distrain::scenario {

/// The result of training on one batch.
struct BatchResult {
  double loss = 0;
  std::optional<double> accuracy;  ///< nullopt for random data
  double batch_s = 0;              ///< passes and update, until devices have finished
  /// Compute time of each stage; nullopt if a device computes.
  std::vector<std::optional<double>> stage_s;
  std::vector<int64_t> activations;  ///< most micro-batches that each stage held
};

/// Returns the part of a micro-batch in the loss of its batch of `batch_size`. The parts sum up to
/// the mean over the batch, and so do their gradients. `scores` is [n, classes], on any device.
at::Tensor loss_share(const PipelineOptions& options, const at::Tensor& scores,
                      const at::Tensor& labels);

/// Returns the loss and accuracy of batch `index`, counted from 0. Throws `not_finite`, with the
/// number of the batch in the message, if the loss is NaN or infinite.
BatchResult judge(const PipelineOptions& options, const std::vector<at::Tensor>& scores,
                  const data::ImageBatch& batch, int64_t index);

/// The model and its optimizer, on the stages or in this process.
class PipelineModel {
 public:
  virtual ~PipelineModel() = default;
  /// Starts a new model, for batches of `num_split` micro-batches.
  virtual void begin(int64_t num_split) = 0;
  /// Makes one update by batch `index`, from 0. Micro-batches are cut as by tensor_split: their
  /// sizes differ by at most one, larger ones first.
  virtual BatchResult train(const data::ImageBatch& batch, int64_t index) = 0;
  /// Returns the scores [n, classes], using the running statistics of batch norm.
  virtual at::Tensor scores(const at::Tensor& images) = 0;
  virtual void set_lr_factor(double factor) = 0;
  /// Returns a snapshot of parameters and buffers under the names of torchvision.
  virtual job::Held state() = 0;
  /// Loads a complete state that has been checked.
  virtual void load(const rpc::NamedTensors& state) = 0;
};

/// The training on the first rank or in one process: trains a new model for each number of
/// micro-batches in turn, and prints its lines.
class PipelineRun {
 public:
  /// Begins the first model.
  PipelineRun(const PipelineOptions& options, const PipelineData& data, PipelineModel& model,
              job::EventSink& sink);

  job::Plan plan() const;
  /// Adds the model and its evaluations to `training`.
  void keep_in(job::TrainingPlan& training);
  job::Result step(const job::Step& step);
  /// Ends the last split and adds the fields of the `end` line.
  void add_to(job::Json& fields);

 private:
  int64_t batches() const;  // per run
  void begin(int64_t num_split);
  void end_split();

  const PipelineOptions& options_;
  const PipelineData& data_;
  PipelineModel& model_;
  job::EventSink& sink_;
  job::StepLines lines_;
  const optim::LearningRateSchedule lr_schedule_;
  int64_t steps_ = 0;
  base::TimePoint begun_;
  double train_s_ = 0;
  // State of the current split.
  std::optional<size_t> split_;
  base::TimePoint split_begun_;
  std::vector<BatchResult> results_;
  job::Json last_, best_;  // of the completed splits
};

/// Throws `invalid` if options contradict each other: more micro-batches than images, a split that
/// does not match the model or the stages, a schedule that cannot run.
void check_pipeline(const PipelineOptions& options);

/// Returns the schedule for each number of micro-batches: as a timeline if `for_people`, otherwise
/// as one line of JSON with the stages, their blocks, the start of each step in units of one step,
/// and the share of waiting. Throws `invalid` if options contradict each other.
std::string explain_pipeline(const PipelineOptions& options, bool for_people);

void train_pipeline(job::Rank& rank, const PipelineOptions& options);
/// Trains in one process without RPC: the reference for correctness and speed.
void train_pipeline_local(job::SingleProcess& local, const PipelineOptions& options);
/// Classifies images with the model of a checkpoint.
void predict_pipeline(job::Predictions& predictions, const PipelineOptions& options);

}  // namespace distrain::scenario
