#pragma once

#include "job_command.h"

namespace distrain::cmd {

/// `distrain pipeline`.
JobCommand pipeline_command();

}  // namespace distrain::cmd
