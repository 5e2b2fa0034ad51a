#pragma once

#include "distrain/app/job_command.h"

namespace distrain::cmd {

/// `distrain hybrid`.
app::JobCommand hybrid_command();

}  // namespace distrain::cmd
