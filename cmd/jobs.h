#pragma once

#include <vector>

#include "distrain/app/main.h"
#include "distrain/scenario/hybrid.h"
#include "distrain/scenario/pipeline.h"
#include "distrain/scenario/ps.h"
#include "distrain/scenario/rl.h"
#include "distrain/scenario/rnn.h"

namespace distrain::cmd {

/// The subcommands that are jobs.
inline std::vector<app::JobCommand> jobs() {
  using namespace scenario;
  return {hybrid_job(), ps_job(), rnn_job(), rl_job(), pipeline_job()};
}

}  // namespace distrain::cmd
