#pragma once

#include "distrain/scenario/rl.h"

namespace distrain::scenario {

/// What the agent does.
void train_rl(job::Rank& rank, const RlOptions& options);
/// What agent and observers do for each other.
void expose_rl(rpc::Agent& agent);
/// The same training in one process without RPC: the same episodes to the last bit.
void train_rl_local(job::Local& local, const RlOptions& options);

/// Plays episodes with the policy of a checkpoint.
void predict_rl(job::Predictions& predictions, const RlOptions& options);

}  // namespace distrain::scenario
