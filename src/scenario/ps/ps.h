#pragma once

#include "distrain/scenario/ps.h"

namespace distrain::scenario {

/// What a trainer does.
void train_ps(job::Rank& rank, const PsOptions& options);
/// What the server does for the trainers.
void expose_ps(rpc::Agent& agent);
/// The same training in one process without RPC: the reference for correctness and speed.
void train_ps_local(job::Local& local, const PsOptions& options);
/// Classifies images with the model of a checkpoint.
void predict_ps(job::Predictions& predictions, const PsOptions& options);

}  // namespace distrain::scenario
