#pragma once

#include "distrain/app/job_command.h"

namespace distrain::cmd {

/// `distrain rl`.
app::JobCommand rl_command();

}  // namespace distrain::cmd
