#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "data.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/schedule.h"
#include "distrain/job/train_log.h"
#include "distrain/models/language_model.h"
#include "distrain/scenario/rnn.h"
#include "language_model.h"

namespace distrain::scenario {

/// A trainer's task, and the learning rate that it is to be done with.
struct RnnTask {
  job::Task task;
  double lr = 0;
  static constexpr auto kFields = std::tuple(&RnnTask::task, &RnnTask::lr);
};

/// How a trainer's epoch went, and its share of the validation.
struct RnnReport {
  WordLoss training;
  WordLoss validation;
  static constexpr auto kFields = std::tuple(&RnnReport::training, &RnnReport::validation);
};

/// What only a trainer has: for checkpoints.
struct RnnTrainerState {
  std::string path;   ///< of the checkpoint
  int64_t steps = 0;  ///< that it has made
  models::LstmState state;
  // Of the first trainer only, as the others' are the same.
  data::NamedTensors lstm;
  data::NamedTensors optimizer;  ///< of the LSTM
  static constexpr auto kFields =
      std::tuple(&RnnTrainerState::path, &RnnTrainerState::steps, &RnnTrainerState::state,
                 &RnnTrainerState::lstm, &RnnTrainerState::optimizer);
};

/// The two ends of the model and everything around it that is not a trainer's: schedule, learning
/// rate, validation, checkpoints. Held by the parameter server, or by the one process of `--local`.
/// Thread-safe once started.
class RnnHost {
 public:
  RnnHost(const RnnOptions& options, const job::Job& job, job::EventSink& sink);

  /// First of all, then start().
  void build(std::shared_ptr<models::WordEmbedding> embedding,
             std::shared_ptr<models::Decoder> decoder, const RnnDataInfo& data);
  /// Goes on from a checkpoint if there is one to go on from. Throws `bad_data` if it does not fit.
  /// `optimizer` is that of embedding and decoder, in the order of parameter_names().
  void start(job::OptimizerAccess optimizer);
  bool started() const { return schedule_.has_value(); }

  const std::shared_ptr<models::WordEmbedding>& embedding() const { return embedding_; }
  const std::shared_ptr<models::Decoder>& decoder() const { return decoder_; }
  const RnnDataInfo& data() const { return data_; }
  static const std::vector<std::string>& parameter_names();
  data::NamedTensors named_parameters() const;  ///< of embedding and decoder

  /// What the trainer had when the checkpoint was saved; nothing if the job begins afresh.
  std::optional<RnnTrainerState> resumed(int trainer) const;

  base::Future<RnnTask> next(int trainer, bool stop, base::Executor& executor);
  void report(const RnnReport& report);
  /// On a task to save.
  void contribute(int trainer, RnnTrainerState state);

  bool stopped() const;
  void add_to(job::Outcome& outcome) const;

 private:
  void resume(const job::Snapshot& snapshot);
  void on_evaluated(bool whole_epoch);
  void save(const job::Position& position);

  const RnnOptions options_;
  job::EventSink& sink_;
  const std::shared_ptr<job::StopSignal> stop_;
  job::Checkpoints checkpoints_;
  std::shared_ptr<models::WordEmbedding> embedding_;
  std::shared_ptr<models::Decoder> decoder_;
  job::OptimizerAccess optimizer_;
  RnnDataInfo data_;
  std::optional<job::Schedule> schedule_;

  mutable std::mutex mutex_;  // of what follows
  double lr_;
  double best_ = std::numeric_limits<double>::max();  // mean loss of a validation
  RnnReport total_;                                   // of the reports since the last
  std::map<int, RnnTrainerState> trainers_;           // of the last checkpoint
  bool has_resumed_ = false;
  job::Json metrics_ = job::Json::object();
  bool stopped_ = false;
};

}  // namespace distrain::scenario
