#pragma once

#include "job_command.h"

namespace distrain::cmd {

/// `distrain rl`.
JobCommand rl_command();

}  // namespace distrain::cmd
