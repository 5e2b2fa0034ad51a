#pragma once

#include "job_command.h"

namespace distrain::cmd {

/// `distrain rnn`.
JobCommand rnn_command();

}  // namespace distrain::cmd
