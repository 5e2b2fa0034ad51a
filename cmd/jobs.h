#pragma once

#include <vector>

#include "distrain/app/main.h"
#include "scenario/hybrid/options.h"
#include "scenario/pipeline/options.h"
#include "scenario/ps/options.h"
#include "scenario/rl/options.h"
#include "scenario/rnn/options.h"

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
