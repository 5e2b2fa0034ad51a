#pragma once

#include <functional>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/job.h"
#include "distrain/job/schedule.h"
#include "distrain/optim/update_rule.h"

namespace distrain::job {

// What the `--local` runs have in common: one process makes the steps of all trainers, in turn.

/// Runs a job's tasks: rounds of one step for each trainer that has one, and evaluations.
void run_tasks(int trainers, const std::function<base::Future<Task>(int trainer)>& next,
               const std::function<void(const std::vector<Task>&)>& train,
               const std::function<void(const std::vector<Task>&)>& evaluate);

/// The state of a rule that is asked directly; both must live as long as what is given back.
OptimizerAccess rule_access(optim::UpdateRule& rule, const std::vector<at::Tensor>& parameters);

/// The `.grad` of each, which is undefined then.
std::vector<at::Tensor> take_gradients(const std::vector<at::Tensor>& parameters);

/// Of the trainers' gradients, in their order, as DistributedOptimizer takes it in sync mode.
std::vector<at::Tensor> mean(const std::vector<std::vector<at::Tensor>>& gathered);

/// The counters of RPC that a run without it has.
Outcome without_rpc(Outcome outcome);

}  // namespace distrain::job
