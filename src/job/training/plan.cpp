#include "distrain/job/plan.h"

#include <utility>

#include "distrain/base/error.h"

namespace distrain::job {

Plan Plan::of(const TrainerOptions& options, int64_t steps_per_epoch) {
  Plan plan;
  const bool by_steps = options.steps > 0 &&
                        (options.epochs == 0 || options.steps < options.epochs * steps_per_epoch);
  plan.epochs = options.epochs;
  plan.steps = by_steps ? options.steps : 0;
  plan.steps_per_epoch = steps_per_epoch;
  plan.take_over = options.mode == "async";
  plan.may_lose = options.mode != "sync";
  plan.eval_only = options.eval_only;
  plan.lr = options.lr;
  plan.lr_schedule = options.rule().schedule.text();
  plan.log_interval = options.log_interval;
  plan.limit = by_steps ? "--steps" : "--epochs";
  return plan;
}

Plan Plan::of_steps(const RuleOptions& options, int64_t steps, std::string limit) {
  Plan plan;
  plan.steps = steps;
  plan.steps_per_epoch = kEndless;
  plan.lr = options.lr;
  const optim::LearningRateSchedule schedule = options.rule().schedule;
  if (schedule.counts_epochs() || schedule.observes()) {
    base::invalid("--lr-schedule " + options.lr_schedule +
                  ": the job has neither epochs nor evaluations");
  }
  plan.lr_schedule = schedule.text();
  plan.limit = std::move(limit);
  plan.log = false;
  plan.steps_at_once = 1;
  return plan;
}

}  // namespace distrain::job
