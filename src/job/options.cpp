#include "distrain/job/options.h"

namespace distrain::job {

optim::Rule RuleOptions::rule() const {
  optim::RuleText text;
  text.optimizer = optimizer;
  text.lr = lr;
  text.momentum = momentum;
  text.weight_decay = weight_decay;
  text.lr_schedule = lr_schedule;
  text.clip = clip;
  return optim::make_rule(text);
}

optim::Sharing TrainerOptions::sharing(int participant) const {
  using Mode = optim::Sharing::Mode;
  optim::Sharing sharing;
  sharing.mode = mode == "sync" ? Mode::kSync : mode == "ssp" ? Mode::kSsp : Mode::kAsync;
  sharing.participants = trainers;
  sharing.participant = participant;
  sharing.staleness = staleness;
  return sharing;
}

}  // namespace distrain::job
