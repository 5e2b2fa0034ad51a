#pragma once

#include "distrain/app/job_command.h"

namespace distrain::cmd {

/// `distrain pipeline`.
app::JobCommand pipeline_command();

}  // namespace distrain::cmd
