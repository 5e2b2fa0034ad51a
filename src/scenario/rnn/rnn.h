#pragma once

#include "distrain/scenario/rnn.h"

namespace distrain::scenario {

/// What a trainer does.
void train_rnn(job::Rank& rank, const RnnOptions& options);
/// What the server does for the trainers.
void expose_rnn(rpc::Agent& agent);
/// The same training in one process without RPC: the reference for correctness and speed.
void train_rnn_local(job::Local& local, const RnnOptions& options);
/// Says what may follow lines of text with the model of a checkpoint.
void predict_rnn(job::Predictions& predictions, const RnnOptions& options);

}  // namespace distrain::scenario
