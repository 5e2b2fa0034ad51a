#pragma once

#include "distrain/scenario/hybrid.h"

namespace distrain::scenario {

/// What a trainer does.
void train_hybrid(job::Rank& rank, const HybridOptions& options);
/// What the master and the server do for the trainers.
void expose_hybrid(rpc::Agent& agent);
/// The same training in one process without RPC: the reference for correctness and speed.
void train_hybrid_local(job::Local& local, const HybridOptions& options);
/// Labels examples with the model of a checkpoint.
void predict_hybrid(job::Predictions& predictions, const HybridOptions& options);

}  // namespace distrain::scenario
