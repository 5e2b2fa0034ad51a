#pragma once

#include <vector>

#include "distrain/app/main.h"
#include "scenario/hybrid/hybrid.h"
#include "scenario/pipeline/pipeline.h"
#include "scenario/ps/ps.h"
#include "scenario/rl/rl.h"
#include "scenario/rnn/rnn.h"

namespace distrain::cmd {

// Names that the definitions use.
using Use = job::DeviceRole::Use;
using enum job::FieldType;
using job::sometimes;

/// Ranks 0..T-1 are the trainers, T is the master, T+1 the parameter server.
const job::Definition<scenario::HybridOptions>& hybrid_job();
/// Rank 0 is the parameter server, ranks 1..T the trainers.
const job::Definition<scenario::PsOptions>& ps_job();
/// Rank 0 is the parameter server, ranks 1..T the trainers.
const job::Definition<scenario::RnnOptions>& rnn_job();
/// Rank 0 is the agent, ranks 1..N the observers. The goal is to solve CartPole.
const job::Definition<scenario::RlOptions>& rl_job();
/// Rank 0 is the master, ranks 1..S the stages.
const job::Definition<scenario::PipelineOptions>& pipeline_job();

inline std::vector<app::JobCommand> jobs() {
  return {hybrid_job(), ps_job(), rnn_job(), rl_job(), pipeline_job()};
}

}  // namespace distrain::cmd
