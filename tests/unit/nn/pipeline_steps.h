// The steps of the first two micro-batches, named as in a schedule's row.
#pragma once

#include "distrain/nn/pipeline.h"

namespace distrain::nn::steps {

using Kind = PipelineStep::Kind;

inline constexpr PipelineStep F0{Kind::kForward, 0}, F1{Kind::kForward, 1};
inline constexpr PipelineStep B0{Kind::kBackward, 0}, B1{Kind::kBackward, 1};

}  // namespace distrain::nn::steps
