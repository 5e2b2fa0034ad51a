#pragma once

#include <functional>

#include "distrain/job/job.h"

namespace distrain::job {

/// A job in one process, `--local`: chooses its devices, runs it on them, and does what `--trace`
/// asks for. Throws what `run` throws, and `resources` if the trace cannot be written.
Outcome run_local_job(const Job& job, EventSink& sink,
                      const std::function<Outcome(const Job& placed)>& run);

}  // namespace distrain::job
