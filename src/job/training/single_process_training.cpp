#include "distrain/job/single_process_training.h"

#include <map>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include "distrain/base/trace.h"
#include "host/training_host.h"

namespace distrain::job {

SingleProcessTraining::SingleProcessTraining(SingleProcess& local, Plan plan, int trainers)
    : TrainingPlan(std::move(plan), local, {}, {0, 1}, nullptr, &local.host()) {
  plan_.trainers = trainers;
  own_.resize(static_cast<size_t>(trainers));
  std::iota(own_.begin(), own_.end(), 0);
}

// Makes rounds of one step per trainer that has one; all other tasks come between rounds.
void SingleProcessTraining::run(const std::function<Result(const std::vector<Step>&)>& step) {
  attach();
  std::map<int, base::Future<NextTask>>
      pending;  // by trainer; pending while others have steps left
  for (Task task; task.kind != Task::Kind::kEnd;) {
    for (int trainer = 0; trainer < plan_.trainers; ++trainer) {
      if (pending.contains(trainer)) continue;
      pending.emplace(trainer, host_->next(seat(trainer), false, reached(), 1));
    }
    std::vector<Step> steps;
    for (auto it = pending.begin(); it != pending.end();) {
      if (!it->second.done()) {
        ++it;
        continue;
      }
      const auto [next, schedule] = it->second.wait();
      it = pending.erase(it);
      lr_schedule_.load_state(schedule);
      if (steps.empty()) task = next;
      steps.push_back({next.epoch, next.shard, next.step, steps_made()});
    }
    if (task.kind == Task::Kind::kTrain) {
      make(steps.at(0), [&] { return step(steps); });
    } else {
      meet(task);
    }
  }
}

void SingleProcessTraining::run(SingleProcessOptimizer& optimizer,
                                const std::function<Result(const Step&)>& step) {
  run([&](const std::vector<Step>& steps) {
    Result all;
    double loss_sum = 0;
    for (const Step& each : steps) {
      const Result one = step(each);
      loss_sum += checked_loss(one.loss, each.epoch, each.number + 1);
      all.samples += one.samples;
      if (all.more.empty()) all.more = one.more;
      base::traced("backward", [&] { one.loss.backward(); });
      optimizer.gather();
      if (optimizer.each_trainer_steps()) optimizer.step();
    }
    if (!optimizer.each_trainer_steps()) optimizer.step();
    all.loss = at::scalar_tensor(loss_sum / static_cast<double>(steps.size()), at::kDouble);
    return all;
  });
}

}  // namespace distrain::job
