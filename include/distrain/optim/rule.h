#pragma once

#include <optional>
#include <string>

#include "distrain/optim/schedule.h"
#include "distrain/optim/update_rule.h"

namespace distrain::optim {

/// How a job changes its parameters.
struct Rule {
  OptimizerOptions options;
  Schedule schedule;    ///< of the learning rate: see DistributedOptimizer::set_lr_factor
  double max_norm = 0;  ///< of the gradients, see DistributedOptimizer::step; 0: no limit
};

/// The same as a command line has it.
struct RuleText {
  std::string optimizer = "sgd";  ///< OptimizerFields::name
  double lr = 0.01;
  double momentum = 0;                   ///< sgd and rmsprop; 0 is nothing to the others
  std::optional<double> weight_decay;    ///< none: the optimizer's own
  std::string lr_schedule = "constant";  ///< Schedule::parse
  double clip = 0;                       ///< Rule::max_norm
};

/// Throws `invalid`, in one line, for what no rule can be made of.
Rule make_rule(const RuleText& text);

}  // namespace distrain::optim
