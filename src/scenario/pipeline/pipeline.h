#pragma once

#include "distrain/scenario/pipeline.h"

namespace distrain::scenario {

/// What the master does.
void train_pipeline(job::Rank& rank, const PipelineOptions& options);
/// The same training in one process without RPC: the reference for correctness and speed.
void train_pipeline_local(job::Local& local, const PipelineOptions& options);

/// Classifies images with the model of a checkpoint.
void predict_pipeline(job::Predictions& predictions, const PipelineOptions& options);

}  // namespace distrain::scenario
