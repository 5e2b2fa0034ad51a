#pragma once

#include <vector>

#include "distrain/app/main.h"
#include "scenario/hybrid/options.h"
#include "scenario/pipeline/options.h"
#include "scenario/ps/options.h"
#include "scenario/rl/options.h"
#include "scenario/rnn/options.h"

namespace distrain::cmd {

inline std::vector<app::JobCommand> jobs() {
  using namespace scenario;
  // The pointers own nothing, because the definitions live until the program exits.
  const auto refer = [](const job::AnyDefinition& definition) {
    return app::JobCommand({std::shared_ptr<void>(), &definition});
  };
  return {refer(hybrid_job()), refer(ps_job()), refer(rnn_job()), refer(rl_job()),
          refer(pipeline_job())};
}

}  // namespace distrain::cmd
