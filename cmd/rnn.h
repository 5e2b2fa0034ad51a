#pragma once

#include "distrain/app/job_command.h"

namespace distrain::cmd {

/// `distrain rnn`.
app::JobCommand rnn_command();

}  // namespace distrain::cmd
