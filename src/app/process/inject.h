#pragma once

#include "distrain/job/job.h"
#include "options.h"

namespace distrain::app {

/// Of `--inject KIND=VALUE[@rank=N][,...]`: throws `invalid` for a part that is wrong, or a rank
/// that the job has not; warns of what has no effect. `has_stages`: ranks from 1 on are stages.
void check_injections(const ParsedOptions& options, bool has_stages, Placement& placement);

/// What meets this rank. Of two that say the same thing the last one holds.
job::Injection injection_of(const ParsedOptions& options, int rank);

}  // namespace distrain::app
