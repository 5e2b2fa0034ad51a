#pragma once

#include "distrain/optim/update_rule.h"

namespace distrain::optim {

/// Throws `invalid` for options out of range.
void validate(const OptimizerOptions& options);

/// Throws `invalid` for what no learning rate can be multiplied by.
void check_lr_factor(double factor);

}  // namespace distrain::optim
