#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "distrain/job/checkpoint_part.h"
#include "distrain/job/events.h"
#include "distrain/job/lease_scheduler.h"
#include "distrain/job/options.h"

namespace distrain::job {

/// The length of the training, and settings of its output.
struct Plan : LeaseScheduler::Options {
  bool eval_only = false;  ///< evaluates only, without training or saving
  double lr = 0;
  std::string lr_schedule;  ///< optim::LearningRateSchedule::parse
  Unit unit = Unit::kSamples;
  std::optional<int> log_interval;            ///< see StepLines
  std::string limit;                          ///< the option that limits the training
  bool log = true;                            ///< print `step` and `epoch` lines
  int64_t steps_at_once = 1'000'000;          ///< maximum number of steps in one task
  std::string what_must_agree = "the files";  ///< for the error if trainers' data differ

  // Set by TrainingPlan.
  int first_rank = 0;                         ///< the rank of the first trainer
  std::map<std::string, std::string> agreed;  ///< TrainingPlan::agree()
  std::map<std::string, std::string> alike;
  std::map<std::string, int64_t> used;  ///< EventSink::used()
  std::vector<PartName> parts;
  static constexpr auto kFields =
      std::tuple(&Plan::trainers, &Plan::epochs, &Plan::steps, &Plan::steps_per_epoch,
                 &Plan::take_over, &Plan::may_lose, &Plan::eval_only, &Plan::lr, &Plan::lr_schedule,
                 &Plan::unit, &Plan::limit, &Plan::what_must_agree, &Plan::first_rank,
                 &Plan::agreed, &Plan::alike, &Plan::used, &Plan::parts);

  /// More steps than any job can make: `steps_per_epoch` of a plan without epochs.
  static constexpr int64_t kEndless = 1'000'000'000'000;

  Plan() { take_over = true; }
  static Plan of(const TrainerOptions& options, int64_t steps_per_epoch);
  /// Returns a plan with one trainer and without epochs and `step` lines. If `steps` is 0, training
  /// has no limit. `limit` names the option that sets `steps`. Throws `invalid` if the learning
  /// rate schedule needs epochs or evaluations.
  static Plan of_steps(const RuleOptions& options, int64_t steps, std::string limit = "");
};

}  // namespace distrain::job
