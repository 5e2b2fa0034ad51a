#pragma once

#include <optional>
#include <string>

#include "distrain/optim/learning_rate_schedule.h"
#include "distrain/optim/update_rule.h"

namespace distrain::optim {

/// A job's optimizer, learning rate schedule and gradient clipping.
struct Rule {
  OptimizerOptions options;
  LearningRateSchedule
      schedule;         ///< learning rate schedule; see DistributedOptimizer::set_lr_factor
  double max_norm = 0;  ///< maximum gradient norm, see DistributedOptimizer::step; 0: no clipping
};

/// A Rule as command-line options.
struct RuleText {
  std::string optimizer = "sgd";  ///< OptimizerFields::name
  double lr = 0.01;
  double momentum = 0;                   ///< sgd and rmsprop only; others accept only 0
  std::optional<double> weight_decay;    ///< none: the optimizer's default
  std::string lr_schedule = "constant";  ///< LearningRateSchedule::parse
  double clip = 0;                       ///< Rule::max_norm
};

/// Parses and checks a rule. Throws `invalid` with a one-line message if `text` is not valid.
Rule make_rule(const RuleText& text);

}  // namespace distrain::optim
