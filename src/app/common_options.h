#pragma once

#include <string>

#include "distrain/app/options.h"

namespace distrain::app {

Option integer(std::string name, std::string initial, double min, double max, std::string help);
/// Above 0.
Option seconds(std::string name, std::string initial, std::string help);

/// Adds what every job has: ranks, network, run.
void append_common(OptionTable& table);

}  // namespace distrain::app
