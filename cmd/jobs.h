#pragma once

#include <vector>

#include "distrain/app/main.h"
#include "distrain/scenario/hybrid.h"
#include "distrain/scenario/pipeline.h"
#include "distrain/scenario/ps.h"
#include "distrain/scenario/rl.h"
#include "distrain/scenario/rnn.h"

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
