#pragma once

#include "distrain/app/job_command.h"

namespace distrain::cmd {

/// `distrain ps`.
app::JobCommand ps_command();

}  // namespace distrain::cmd
