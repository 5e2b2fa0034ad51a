#include "distrain/optim/rule.h"

#include <cmath>

#include "distrain/base/error.h"

namespace distrain::optim {

Rule make_rule(const RuleText& text) {
  OptimizerFields fields{text.optimizer, {{"lr", text.lr}}};
  if (text.weight_decay) fields.values["weight_decay"] = *text.weight_decay;
  // Optimizers without momentum do not have this field, and accept only 0 for the option.
  if (text.momentum != 0) fields.values["momentum"] = text.momentum;
  if (!std::isfinite(text.clip) || text.clip < 0) {
    base::invalid("gradients cannot be clipped to a norm of " + std::to_string(text.clip));
  }
  return {from_fields(fields), LearningRateSchedule::parse(text.lr_schedule), text.clip};
}

}  // namespace distrain::optim
