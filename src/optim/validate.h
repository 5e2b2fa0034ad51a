#pragma once

#include "distrain/optim/update_rule.h"

namespace distrain::optim {

/// Throws `invalid` for options out of range.
void validate(const OptimizerOptions& options);

}  // namespace distrain::optim
