#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "checkpoints.h"
#include "distrain/optim/update_rule.h"
#include "distrain/scenario/ps.h"
#include "ps_data.h"
#include "ps_model.h"
#include "schedule.h"
#include "train_log.h"

namespace distrain::scenario {

/// How a trainer's epoch went, and its share of the evaluation.
struct PsReport {
  double loss = 0;  ///< mean of its steps in the epoch
  int64_t steps = 0;
  int64_t staleness = 0;  ///< the greatest so far
  Evaluation evaluation;
  static constexpr auto kFields =
      std::tuple(&PsReport::loss, &PsReport::steps, &PsReport::staleness, &PsReport::evaluation);
};

/// The model of a job and everything around it that is not a trainer's: schedule, evaluation,
/// checkpoints. Held by the parameter server, or by the one process of `--local`. Thread-safe once
/// started.
class PsHost {
 public:
  PsHost(const PsOptions& options, const Job& job, EventSink& sink);

  /// Goes on from a checkpoint if there is one to go on from. Throws `bad_data` if it does not fit.
  void start(std::shared_ptr<ConvNet> model, OptimizerAccess optimizer, const PsDataInfo& data);
  bool started() const { return schedule_.has_value(); }

  const std::shared_ptr<ConvNet>& model() const { return model_; }
  const PsDataInfo& data() const { return data_; }
  /// Steps of each trainer that were made before this run.
  int64_t resumed_at() const { return resumed_at_; }

  base::Future<Task> next(int trainer, bool stop);
  void report(const PsReport& report);

  void add_to(Outcome& outcome) const;

 private:
  void resume(const Snapshot& snapshot);
  void on_evaluated();
  void save(const Position& position);

  const PsOptions options_;
  EventSink& sink_;
  const std::shared_ptr<StopSignal> stop_;
  Checkpoints checkpoints_;
  std::shared_ptr<ConvNet> model_;
  OptimizerAccess optimizer_;
  PsDataInfo data_;
  std::optional<Schedule> schedule_;
  int64_t resumed_at_ = 0;

  mutable std::mutex mutex_;  // of what follows
  PsReport total_;            // of the reports since the last evaluation
  Json metrics_ = Json::object();
  bool stopped_ = false;
};

}  // namespace distrain::scenario
