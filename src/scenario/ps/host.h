#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "data.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/schedule.h"
#include "distrain/job/train_log.h"
#include "distrain/models/conv_net.h"
#include "distrain/optim/update_rule.h"
#include "distrain/scenario/ps.h"

namespace distrain::scenario {

/// How a trainer's epoch went, and its share of the evaluation.
struct PsReport {
  double loss = 0;  ///< mean of its steps in the epoch
  int64_t steps = 0;
  int64_t staleness = 0;  ///< the greatest so far
  job::Evaluation evaluation;
  static constexpr auto kFields =
      std::tuple(&PsReport::loss, &PsReport::steps, &PsReport::staleness, &PsReport::evaluation);
};

/// The model of a job and everything around it that is not a trainer's: schedule, evaluation,
/// checkpoints. Held by the parameter server, or by the one process of `--local`. Thread-safe once
/// started.
class PsHost {
 public:
  PsHost(const PsOptions& options, const job::Job& job, job::EventSink& sink);

  /// Goes on from a checkpoint if there is one to go on from. Throws `bad_data` if it does not fit.
  void start(std::shared_ptr<models::ConvNet> model, job::OptimizerAccess optimizer,
             const PsDataInfo& data);
  bool started() const { return schedule_.has_value(); }

  const std::shared_ptr<models::ConvNet>& model() const { return model_; }
  const PsDataInfo& data() const { return data_; }
  /// Steps of each trainer that were made before this run.
  int64_t resumed_at() const { return resumed_at_; }

  base::Future<job::Task> next(int trainer, bool stop);
  void report(const PsReport& report);

  void add_to(job::Outcome& outcome) const;

 private:
  void resume(const job::Snapshot& snapshot);
  void on_evaluated();
  void save(const job::Position& position);

  const PsOptions options_;
  job::EventSink& sink_;
  const std::shared_ptr<job::StopSignal> stop_;
  job::Checkpoints checkpoints_;
  std::shared_ptr<models::ConvNet> model_;
  job::OptimizerAccess optimizer_;
  PsDataInfo data_;
  std::optional<job::Schedule> schedule_;
  int64_t resumed_at_ = 0;

  mutable std::mutex mutex_;  // of what follows
  PsReport total_;            // of the reports since the last evaluation
  job::Json metrics_ = job::Json::object();
  bool stopped_ = false;
};

optim::OptimizerOptions optimizer_options(const PsOptions& options);

}  // namespace distrain::scenario
