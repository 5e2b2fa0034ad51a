#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distrain/job/job.h"
#include "distrain/job/training.h"
#include "distrain/optim/local_updates.h"

namespace distrain::job {

class TrainingHost;

/// What a job's `--local` function works with: one process that makes the steps of all trainers.
class Local {
 public:
  Local(const Job& job, EventSink& sink, std::shared_ptr<TrainingHost> host)
      : job_(job), sink_(sink), host_(std::move(host)) {}

  const Job& job() const { return job_; }
  EventSink& sink() const { return sink_; }
  c10::Device device() const { return job_.device(); }
  /// Fields of the last line.
  Json& fields() { return fields_; }
  /// As Rank's.
  void miss_goal(std::string message) { missed_goal_ = std::move(message); }
  const std::string& missed_goal() const { return missed_goal_; }
  TrainingHost& host() const { return *host_; }

 private:
  const Job& job_;
  EventSink& sink_;
  const std::shared_ptr<TrainingHost> host_;
  Json fields_ = Json::object();
  std::string missed_goal_;
};

/// By the name that TrainingPlan::keep() has for it.
class LocalUpdates : public optim::LocalUpdates {
 public:
  using optim::LocalUpdates::LocalUpdates;
};

/// As Training, of all trainers in one process: a step is one of each.
class LocalTraining : public TrainingPlan {
 public:
  LocalTraining(Local& local, const TrainerOptions& options, int64_t steps_per_epoch)
      : LocalTraining(local, Plan::of(options, steps_per_epoch), options.trainers) {}
  LocalTraining(Local& local, Plan plan, int trainers);

  using TrainingPlan::keep;
  void keep(const std::string& name, const torch::nn::Module& module) {
    keep(name, part_of(named_tensors(name, module)));
  }

  /// `steps`: of each trainer that has one. `loss` of the result is the mean, `samples` the sum.
  void run(const std::function<Result(const std::vector<Step>& steps)>& step);
  /// `step` makes one trainer's forward pass; its backward pass follows, and the updates of all.
  void run(LocalUpdates& updates, const std::function<Result(const Step& step)>& step);

 private:
  base::Future<Task> next(int trainer);
  void attach();

  Local& local_;
  const int trainers_;
  base::InlineExecutor executor_;
};

}  // namespace distrain::job
