#pragma once

#include "job_command.h"

namespace distrain::cmd {

/// `distrain hybrid`.
JobCommand hybrid_command();

}  // namespace distrain::cmd
