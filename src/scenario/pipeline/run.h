#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distrain/data/images.h"
#include "pipeline.h"

namespace distrain::scenario {

/// Returns the examples of batch `index` in a sequence of epochs. Each epoch is shuffled by `seed`
/// and the epoch's number. All batches are full: a batch may continue in the next epoch.
std::vector<int64_t> full_batch(uint64_t seed, int64_t index, int64_t examples, int64_t batch_size);

/// The batches of the job and its initial weights: random images without `data`, otherwise images
/// from CIFAR-10 or IDX files.
///
/// Random images have, as in the tutorial, standard normal pixels and labels below `classes`; they
/// depend only on the seed and the batch. Files are read epoch after epoch: see full_batch().
/// CIFAR-10 is normalised by channel. Grey images become (x - 0.5) / 0.5 in three equal channels.
class PipelineData {
 public:
  /// Reads the files. Throws `bad_data` if a file cannot be read or is not valid.
  explicit PipelineData(const PipelineOptions& options);
  /// Reads images to classify, in the format that the model of the checkpoint was trained on.
  PipelineData(const PipelineOptions& options, const job::Snapshot& snapshot,
               const std::string& images);

  /// Returns batch `index`, from 0, which always has `batch_size` images.
  data::ImageBatch batch(int64_t index) const;
  /// Returns the number of full batches per epoch, at least 1. Do not call it for random data.
  int64_t batches_per_epoch() const {
    return std::max<int64_t>(images_.count / options_.batch_size, 1);
  }

  /// Return the images to evaluate after each epoch (valid) and at the end (test); may be empty.
  const data::ImageSet& valid() const { return valid_; }
  const data::ImageSet& test() const { return test_; }
  /// Calls `use` with each batch of the share. Labels are -1 if the images have no labels.
  void each_batch(const data::ImageSet& images, const job::Share& share,
                  const std::function<void(const data::ImageBatch&)>& use) const;

  /// Returns the format (random, cifar10, idx), and the number and normalisation of images.
  job::Json describe() const;
  /// Returns the hash of the files; 0 for random data.
  uint64_t content_hash() const { return images_.content_hash; }
  /// Returns the initial weights. If empty, the model initialises itself.
  const rpc::NamedTensors& weights() const { return weights_; }

 private:
  const PipelineOptions options_;
  data::ImageSet images_;  // empty: random images
  data::ImageSet valid_, test_;
  rpc::NamedTensors weights_;
};

struct BatchResult {
  double loss = 0;
  std::optional<double> accuracy;  ///< nullopt for random data
  double batch_s = 0;              ///< seconds for passes and update, until devices finish
  /// Compute time of each stage in seconds; nullopt on an accelerator.
  std::vector<std::optional<double>> stage_s;
  std::vector<int64_t> activations;  ///< most micro-batches that each stage held at a time
};

/// Returns a micro-batch's part of the loss of its batch of `batch_size`. The sum of the parts is
/// the mean over the batch, also for gradients. `scores` is [n, classes], on any device.
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
  /// Makes one update by batch `index`, from 0. Splits it into micro-batches as tensor_split does:
  /// their sizes differ by at most one, larger ones first.
  virtual BatchResult train(const data::ImageBatch& batch, int64_t index, double lr_factor) = 0;
  /// Returns the scores [n, classes], using the running statistics of batch norm.
  virtual at::Tensor scores(const at::Tensor& images) = 0;
  /// Returns a snapshot of parameters and buffers under the names of torchvision.
  virtual job::Held state() = 0;
  /// Loads a complete state that check_weights() has accepted.
  virtual void load(const rpc::NamedTensors& state) = 0;
};

/// The training loop, on rank 0 or in a single process: trains a new model for each number of
/// micro-batches in `num_split`, and prints the output lines.
class PipelineRun {
 public:
  /// Begins the model for the first number of micro-batches in `num_split`.
  PipelineRun(const PipelineOptions& options, const PipelineData& data, PipelineModel& model,
              job::EventSink& sink);

  job::Plan plan() const;
  /// Adds the model and its evaluations to `training`.
  void keep_in(job::TrainingPlan& training);
  job::Result step(const job::Step& step);
  /// Ends the last model's training and adds the results to `fields`, for the `end` line.
  void add_to(job::Json& fields);

 private:
  // Returns the number of batches of each model.
  int64_t batches() const {
    return options_.epochs == 0 ? options_.batches : options_.epochs * data_.batches_per_epoch();
  }
  void begin(int64_t num_split) {
    model_.begin(num_split);
    if (!data_.weights().empty()) model_.load(data_.weights());
  }
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
  // State of the current model, which uses `num_split[*split_]` micro-batches.
  std::optional<size_t> split_;
  base::TimePoint split_begun_;
  std::vector<BatchResult> results_;
  job::Json last_, best_;  // fields of the last completed run, and of the fastest
};

}  // namespace distrain::scenario
