#pragma once

#include "options.h"

namespace distrain::cmd {

/// The options of `distrain hybrid`: its own, then those of every scenario.
OptionTable hybrid_option_table();

}  // namespace distrain::cmd
