#include "distrain/job/local_training.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/trace.h"
#include "training_host.h"

namespace distrain::job {

namespace {

using Gradients = std::vector<at::Tensor>;

/// Of the trainers' gradients, in their order, as DistributedOptimizer takes it in sync mode.
Gradients mean(const std::vector<Gradients>& gathered) {
  Gradients means = gathered[0];
  if (gathered.size() == 1) return means;
  for (size_t i = 0; i < means.size(); ++i) {
    for (size_t t = 1; t < gathered.size(); ++t) means[i] = means[i] + gathered[t][i];
    means[i] = means[i] / static_cast<double>(gathered.size());
  }
  return means;
}

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

struct LocalUpdates::Some {
  Some(const optim::Rule& how, const Named& named) : rule(optim::make_update_rule(how.options)) {
    for (const auto& [name, parameter] : named) {
      names.push_back(name);
      parameters.push_back(parameter);
    }
  }

  void apply(const Gradients& gradients, double scale) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      rule->apply(i, parameters[i], scale == 1 ? gradients[i] : gradients[i] * scale);
    }
  }

  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
  std::unique_ptr<optim::UpdateRule> rule;
  std::vector<Gradients> gathered;
};

LocalUpdates::LocalUpdates(const optim::Rule& rule, const std::string& mode, Named shared,
                           Named replicated)
    : max_norm_(rule.max_norm),
      sync_(mode == "sync"),
      shared_(std::make_unique<Some>(rule, shared)),
      replicated_(std::make_unique<Some>(rule, replicated)) {}

LocalUpdates::~LocalUpdates() = default;

void LocalUpdates::gather() {
  for (Some* some : {shared_.get(), replicated_.get()}) {
    some->gathered.push_back(take_gradients(some->parameters));
  }
}

// As DistributedOptimizer does with clipping: one scale for all.
void LocalUpdates::step() {
  const base::TraceScope scope("update");
  const at::NoGradGuard no_grad;
  std::vector<Gradients> updates = std::exchange(shared_->gathered, {});
  const Gradients replicated = mean(std::exchange(replicated_->gathered, {}));
  if (sync_) updates = {mean(updates)};
  double scale = 1;
  if (max_norm_ > 0) {
    double squared = 0;
    for (const Gradients& gradients : updates) squared += optim::norm_squared(gradients);
    squared = squared / static_cast<double>(updates.size()) + optim::norm_squared(replicated);
    scale = optim::clip_scale(squared, max_norm_);
  }
  for (const Gradients& gradients : updates) shared_->apply(gradients, scale);
  replicated_->apply(replicated, scale);
  updates_ += static_cast<int64_t>(updates.size());
}

void LocalUpdates::set_lr_factor(double factor) {
  shared_->rule->set_lr_factor(factor);
  replicated_->rule->set_lr_factor(factor);
}

bool LocalUpdates::has_replicas() const { return !replicated_->parameters.empty(); }

std::vector<std::string> LocalUpdates::names() const {
  std::vector<std::string> all = shared_->names;
  all.insert(all.end(), replicated_->names.begin(), replicated_->names.end());
  return all;
}

std::vector<optim::ParameterState> LocalUpdates::state() const {
  std::vector<optim::ParameterState> states;
  for (const Some* some : {shared_.get(), replicated_.get()}) {
    for (size_t i = 0; i < some->parameters.size(); ++i) states.push_back(some->rule->state(i));
  }
  return states;
}

void LocalUpdates::load_state(const std::vector<optim::ParameterState>& state) {
  auto next = state.begin();
  for (const Some* some : {shared_.get(), replicated_.get()}) {
    for (size_t i = 0; i < some->parameters.size(); ++i) {
      some->rule->load_state(i, some->parameters[i], *next++);
    }
  }
}

std::vector<at::Tensor> take_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  return gradients;
}

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

}  // namespace distrain::job
