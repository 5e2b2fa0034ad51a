#pragma once

#include "distrain/job/job.h"
#include "options.h"

namespace distrain::app {

/// Checks `--inject KIND=VALUE[@rank=N][,...]`: throws `invalid` for a wrong part or unknown rank;
/// warns of parts without effect. `has_stages`: ranks from 1 on are stages.
void check_injections(const ParsedOptions& options, bool has_stages, Placement& placement);

/// What meets this rank. Of two that say the same thing the last one holds.
job::Injection injection_of(const ParsedOptions& options, int rank);

}  // namespace distrain::app
