#include "distrain/job/local_training.h"

#include <ATen/Functions.h>

#include "distrain/base/trace.h"
#include "training_host.h"

namespace distrain::job {

namespace {

/// Runs a job's tasks: rounds of one step for each trainer that has one, and what all do together.
void run_tasks(int trainers, const std::function<base::Future<Task>(int trainer)>& next,
               const std::function<void(const std::vector<Task>&)>& perform) {
  std::vector<base::Future<Task>> pending(static_cast<size_t>(trainers));
  std::vector<bool> waits(static_cast<size_t>(trainers));
  for (;;) {
    for (size_t t = 0; t < pending.size(); ++t) {
      if (!waits[t]) pending[t] = next(static_cast<int>(t));
    }
    std::vector<Task> tasks;
    for (size_t t = 0; t < pending.size(); ++t) {
      waits[t] = !pending[t].done();  // for those that still have steps in this epoch
      if (!waits[t]) tasks.push_back(pending[t].wait());
    }
    perform(tasks);
    if (tasks.at(0).kind == Task::Kind::kEnd) return;
  }
}

}  // namespace

LocalTraining::LocalTraining(Local& local, Plan plan, int trainers)
    : TrainingPlan(std::move(plan), local.sink()), local_(local), trainers_(trainers) {}

void LocalTraining::attach() {
  Attachment own = attachment();
  own.trainers = trainers_;
  Attached attached;
  for (own.trainer = 0; own.trainer < trainers_; ++own.trainer) {
    attached = local_.host().attach(own, own.trainer);  // each as if it were a rank
  }
  made_ = attached.steps_made;
  log_.resume_after(made_);
  if (attached.path.empty()) return;
  for (int trainer = 0; trainer < trainers_; ++trainer) {
    give(trainer, attached.path,
         [&](const PartName& part) { return local_.host().saved_part(part, trainer); });
  }
}

base::Future<Task> LocalTraining::next(int trainer) {
  return local_.host()
      .next(trainer, false, reached(), 1, executor_)
      .then(executor_, [this](const Lease& lease) {
        plan_.lr_schedule.load_state(lease.schedule);
        return lease.task;
      });
}

void LocalTraining::run(const std::function<Result(const std::vector<Step>&)>& step) {
  attach();
  const std::vector<Share> all = {{0, 1}};
  run_tasks(
      trainers_, [this](int trainer) { return next(trainer); },
      [&](const std::vector<Task>& tasks) {
        const Task& first = tasks.at(0);
        if (first.kind == Task::Kind::kTrain) {
          const base::TraceScope scope("step", "step", made_);
          if (log_.epoch() != first.epoch) log_.begin_epoch(first.epoch);
          set_lr_factors(first.epoch);
          std::vector<Step> steps;
          for (const Task& task : tasks)
            steps.push_back({task.epoch, task.shard, task.step, made_});
          made(step(steps), first.epoch, first.step);
        } else if (first.kind == Task::Kind::kEvaluate) {
          local_.host().report(close_epoch(first, all));
        } else if (first.kind == Task::Kind::kSave) {
          for (int trainer = 0; trainer < trainers_; ++trainer) {
            local_.host().contribute(taken(trainer));
          }
        } else {
          if (log_.epoch_steps() > 0) local_.host().report(close_epoch(first, {}));
          log_.end_epoch();
          stopped_ = first.stopped || local_.job().stop->requested();
        }
      });
  Json& fields = local_.fields();
  fields["steps"] = log_.steps() * trainers_;
  fields["train_s"] = log_.train_s();
  if (plan_.unit == Unit::kWords && log_.train_s() > 0) {
    fields["words_per_s"] = static_cast<double>(samples_) / log_.train_s();
  }
}

void LocalTraining::run(LocalUpdates& updates, const std::function<Result(const Step&)>& step) {
  run([&](const std::vector<Step>& steps) {
    Result all;
    double loss_sum = 0;
    for (const Step& each : steps) {
      const Result one = step(each);
      loss_sum += one.loss.item<double>();
      all.samples += one.samples;
      if (all.more.empty()) all.more = one.more;
      base::traced("backward", [&] { one.loss.backward(); });
      updates.gather();
      if (updates.in_turns()) updates.step();
    }
    if (!updates.in_turns()) updates.step();
    all.loss = at::scalar_tensor(loss_sum / static_cast<double>(steps.size()), at::kDouble);
    return all;
  });
}

}  // namespace distrain::job
