#pragma once

#include "job_command.h"

namespace distrain::cmd {

/// `distrain ps`.
JobCommand ps_command();

}  // namespace distrain::cmd
