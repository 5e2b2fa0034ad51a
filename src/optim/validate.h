#pragma once

#include "distrain/optim/update_rule.h"

namespace distrain::optim {

/// Throws `invalid` if an option is out of range.
void validate(const OptimizerOptions& options);

/// Throws `invalid` if `factor` is negative or not finite.
void check_lr_factor(double factor);

}  // namespace distrain::optim
