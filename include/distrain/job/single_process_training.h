#pragma once

#include <functional>
#include <string>
#include <vector>

#include "distrain/job/training.h"

namespace distrain::job {

/// The argument of a job's `--local` function: one process that makes the steps of all trainers.
class SingleProcess : public Process {
 public:
  SingleProcess(const Job& job, EventSink& sink, TrainingHost& host)
      : Process(job, sink), host_(host) {}
  TrainingHost& host() const { return host_; }

 private:
  TrainingHost& host_;
};

/// The training loop of a job in one process. Each of its steps makes one step of every trainer.
class SingleProcessTraining : public TrainingPlan {
 public:
  SingleProcessTraining(SingleProcess& local, const TrainerOptions& options,
                        int64_t steps_per_epoch)
      : SingleProcessTraining(local, Plan::of(options, steps_per_epoch)) {}
  SingleProcessTraining(SingleProcess& local, Plan plan);

  using TrainingPlan::keep;
  void keep(const std::string& name, const torch::nn::Module& module) {
    keep(name, part_of(store::named_tensors(name, module)));
  }

  /// Trains to the end of the job. `step` makes the given steps, at most one step of each trainer,
  /// and returns their mean loss and the sum of their samples.
  void run(const std::function<Result(const std::vector<Step>& steps)>& step);
  /// Trains to the end of the job. `step` computes one trainer's loss; run() makes the backward
  /// pass and the updates.
  void run(SingleProcessOptimizer& optimizer, const std::function<Result(const Step& step)>& step);
};

}  // namespace distrain::job
