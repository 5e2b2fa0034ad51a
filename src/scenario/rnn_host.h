#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "checkpoints.h"
#include "distrain/scenario/rnn.h"
#include "language_model.h"
#include "rnn_data.h"
#include "rnn_model.h"
#include "schedule.h"
#include "train_log.h"

namespace distrain::scenario {

/// A trainer's task, and the learning rate that it is to be done with.
struct RnnTask {
  Task task;
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
  LstmState state;
  // Of the first trainer only, as the others' are the same.
  NamedTensors lstm;
  NamedTensors optimizer;  ///< of the LSTM
  static constexpr auto kFields =
      std::tuple(&RnnTrainerState::path, &RnnTrainerState::steps, &RnnTrainerState::state,
                 &RnnTrainerState::lstm, &RnnTrainerState::optimizer);
};

/// The two ends of the model and everything around it that is not a trainer's: schedule, learning
/// rate, validation, checkpoints. Held by the parameter server, or by the one process of `--local`.
/// Thread-safe once started.
class RnnHost {
 public:
  RnnHost(const RnnOptions& options, const Job& job, EventSink& sink);

  /// First of all, then start().
  void build(std::shared_ptr<WordEmbedding> embedding, std::shared_ptr<Decoder> decoder,
             const RnnDataInfo& data);
  /// Goes on from a checkpoint if there is one to go on from. Throws `bad_data` if it does not fit.
  /// `optimizer` is that of embedding and decoder, in the order of parameter_names().
  void start(OptimizerAccess optimizer);
  bool started() const { return schedule_.has_value(); }

  const std::shared_ptr<WordEmbedding>& embedding() const { return embedding_; }
  const std::shared_ptr<Decoder>& decoder() const { return decoder_; }
  const RnnDataInfo& data() const { return data_; }
  static const std::vector<std::string>& parameter_names();
  NamedTensors named_parameters() const;  ///< of embedding and decoder

  /// What the trainer had when the checkpoint was saved; nothing if the job begins afresh.
  std::optional<RnnTrainerState> resumed(int trainer) const;

  base::Future<RnnTask> next(int trainer, bool stop, base::Executor& executor);
  void report(const RnnReport& report);
  /// On a task to save.
  void contribute(int trainer, RnnTrainerState state);

  bool stopped() const;
  void add_to(Outcome& outcome) const;

 private:
  void resume(const Snapshot& snapshot);
  void on_evaluated(bool whole_epoch);
  void save(const Position& position);

  const RnnOptions options_;
  EventSink& sink_;
  const std::shared_ptr<StopSignal> stop_;
  Checkpoints checkpoints_;
  std::shared_ptr<WordEmbedding> embedding_;
  std::shared_ptr<Decoder> decoder_;
  OptimizerAccess optimizer_;
  RnnDataInfo data_;
  std::optional<Schedule> schedule_;

  mutable std::mutex mutex_;  // of what follows
  double lr_;
  double best_ = std::numeric_limits<double>::max();  // mean loss of a validation
  RnnReport total_;                                   // of the reports since the last
  std::map<int, RnnTrainerState> trainers_;           // of the last checkpoint
  bool has_resumed_ = false;
  Json metrics_ = Json::object();
  bool stopped_ = false;
};

}  // namespace distrain::scenario
