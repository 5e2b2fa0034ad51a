#pragma once

#include <functional>
#include <string>
#include <vector>

#include "distrain/job/training.h"

namespace distrain::job {

/// What a job's `--local` function works with: one process that makes the steps of all trainers.
class Local : public Process {
 public:
  Local(const Job& job, EventSink& sink, TrainingHost& host) : Process(job, sink), host_(host) {}
  TrainingHost& host() const { return host_; }

 private:
  TrainingHost& host_;
};

/// As Training, of all trainers in one process: a step is one of each.
class LocalTraining : public TrainingPlan {
 public:
  LocalTraining(Local& local, const TrainerOptions& options, int64_t steps_per_epoch)
      : LocalTraining(local, Plan::of(options, steps_per_epoch), options.trainers) {}
  LocalTraining(Local& local, Plan plan, int trainers);

  using TrainingPlan::keep;
  void keep(const std::string& name, const torch::nn::Module& module) {
    keep(name, part_of(data::named_tensors(name, module)));
  }

  /// `steps`: of each trainer that has one. `loss` of the result is the mean, `samples` the sum.
  void run(const std::function<Result(const std::vector<Step>& steps)>& step);
  /// `step` makes one trainer's forward pass; its backward pass follows, and the updates of all.
  void run(LocalUpdates& updates, const std::function<Result(const Step& step)>& step);
};

}  // namespace distrain::job
