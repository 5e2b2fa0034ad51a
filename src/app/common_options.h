#pragma once

#include "distrain/app/options.h"

namespace distrain::app {

/// Adds what every job has: ranks, network, run.
void append_common(OptionTable& table);

}  // namespace distrain::app
