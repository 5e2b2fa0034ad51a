#pragma once

#include <vector>

#include "distrain/app/main.h"
#include "scenario/hybrid/hybrid.h"
#include "scenario/pipeline/pipeline.h"
#include "scenario/ps/ps.h"
#include "scenario/rl/rl.h"
#include "scenario/rnn/rnn.h"

namespace distrain::cmd {

using Use = job::DeviceRole::Use;
using enum job::FieldType;
using job::sometimes;

const job::Definition<scenario::HybridOptions>& hybrid_job();
const job::Definition<scenario::PsOptions>& ps_job();
const job::Definition<scenario::RnnOptions>& rnn_job();
const job::Definition<scenario::RlOptions>& rl_job();
const job::Definition<scenario::PipelineOptions>& pipeline_job();

inline std::vector<app::JobCommand> jobs() {
  return {hybrid_job(), ps_job(), rnn_job(), rl_job(), pipeline_job()};
}

}  // namespace distrain::cmd
