#include "distrain/job/local_trainers.h"

#include <ATen/Functions.h>

namespace distrain::job {

void run_tasks(int trainers, const std::function<base::Future<Task>(int trainer)>& next,
               const std::function<void(const std::vector<Task>&)>& train,
               const std::function<void(const std::vector<Task>&)>& evaluate) {
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
    switch (tasks.at(0).kind) {
      case Task::Kind::kTrain:
        train(tasks);
        break;
      case Task::Kind::kEvaluate:
        evaluate(tasks);
        break;
      case Task::Kind::kSave:
        break;
      case Task::Kind::kEnd:
        return;
    }
  }
}

OptimizerAccess rule_access(optim::UpdateRule& rule, const std::vector<at::Tensor>& parameters) {
  const auto get = [&rule, count = parameters.size()] {
    std::vector<optim::ParameterState> states;
    for (size_t i = 0; i < count; ++i) states.push_back(rule.state(i));
    return states;
  };
  const auto set = [&rule, parameters](const std::vector<optim::ParameterState>& states) {
    for (size_t i = 0; i < states.size(); ++i) rule.load_state(i, parameters.at(i), states[i]);
  };
  return {get, set};
}

std::vector<at::Tensor> take_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  return gradients;
}

std::vector<at::Tensor> mean(const std::vector<std::vector<at::Tensor>>& gathered) {
  std::vector<at::Tensor> means = gathered[0];
  if (gathered.size() == 1) return means;
  for (size_t i = 0; i < means.size(); ++i) {
    for (size_t t = 1; t < gathered.size(); ++t) means[i] = means[i] + gathered[t][i];
    means[i] = means[i] / static_cast<double>(gathered.size());
  }
  return means;
}

Outcome without_rpc(Outcome outcome) {
  outcome.fields["rpc"] = {{"calls", 0}, {"bytes_out", 0}, {"bytes_in", 0}};
  outcome.fields["live_rrefs"] = 0;
  outcome.fields["live_contexts"] = 0;
  return outcome;
}

}  // namespace distrain::job
