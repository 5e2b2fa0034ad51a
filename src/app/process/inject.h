#pragma once

#include "distrain/job/job.h"
#include "options.h"

namespace distrain::app {

/// Throws `invalid` if `--inject KIND=VALUE[@rank=N][,...]` is malformed or impossible. Warns in
/// `placement` of faults without effect. `has_stages`: ranks from 1 on are pipeline stages.
void check_injections(const ParsedOptions& options, bool has_stages, Placement& placement);

/// Returns the faults for `rank`. If a kind is given twice, the last one applies.
job::Injection injection_of(const ParsedOptions& options, int rank);

}  // namespace distrain::app
