#pragma once

#include <memory>
#include <vector>

#include "distrain/app/main.h"
#include "scenario/hybrid/options.h"
#include "scenario/pipeline/options.h"
#include "scenario/ps/options.h"
#include "scenario/rl/options.h"
#include "scenario/rnn/options.h"

namespace distrain::cmd {

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
  // The pointers own nothing, because the definitions live until the program exits.
  const auto refer = [](const job::AnyDefinition& definition) {
    return app::JobCommand({std::shared_ptr<void>(), &definition});
  };
  return {refer(hybrid_job()), refer(ps_job()), refer(rnn_job()), refer(rl_job()),
          refer(pipeline_job())};
}

}  // namespace distrain::cmd
