#include "distrain/job/single_process_training.h"

#include <numeric>

#include <ATen/Functions.h>

#include "host/training_host.h"

namespace distrain::job {

SingleProcessTraining::SingleProcessTraining(SingleProcess& local, Plan plan)
    : TrainingPlan(std::move(plan), local, {}, nullptr, &local.host()) {
  own_.resize(static_cast<size_t>(plan_.trainers));
  std::iota(own_.begin(), own_.end(), 0);
}

// In each round, makes a step of each trainer with steps left. Evaluates and saves between rounds.
void SingleProcessTraining::run(const std::function<Result(const std::vector<Step>&)>& step) {
  attach();
  std::map<int, base::Future<NextTask>> pending;  // by trainer, until the next task is known
  for (Task task; task.kind != Task::Kind::kEnd;) {
    for (const int trainer : own_) {
      if (pending.contains(trainer)) continue;
      const Demand wish = demand(trainer, 1);
      pending.emplace(trainer, host_->next(seat(trainer), false, reached(), wish));
    }
    std::vector<Step> steps;
    std::erase_if(pending, [&](auto& each) {
      if (!each.second.done()) return false;
      const auto [next, schedule] = each.second.wait();
      lr_schedule_.load_state(schedule);
      if (steps.empty()) task = next;
      go_to(each.first, next.start);
      if (next.count == 0) return true;
      steps.push_back({next.epoch, next.shard, next.step, steps_made(), 0, next.has_data,
                       source_of(each.first)});
      return true;
    });
    asks_for_steps_ = task.kind == Task::Kind::kTrain;
    if (steps.empty()) continue;
    if (asks_for_steps_) {
      const int64_t with_data = std::ranges::count_if(steps, &Step::has_data);
      make(steps.at(0), plan_.streams ? with_data : std::ssize(own_), [&] { return step(steps); });
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
    double with_data = 0;
    for (const Step& each : steps) {
      if (!each.has_data && (plan_.average_over_data || optimizer.each_trainer_steps())) continue;
      const Result one = step(each);
      with_data += each.has_data ? 1 : 0;
      loss_sum += checked_loss(one.loss, each.epoch, each.number + 1);
      all.samples += one.samples;
      if (all.more.empty()) all.more = one.more;
      if (!one.has_gradients) base::traced("backward", [&] { one.loss.backward(); });
      optimizer.gather();
      if (optimizer.each_trainer_steps()) optimizer.step();
    }
    if (!optimizer.each_trainer_steps()) optimizer.step();
    all.loss = at::scalar_tensor(loss_sum / with_data, at::kDouble);
    return all;
  });
}

}  // namespace distrain::job
