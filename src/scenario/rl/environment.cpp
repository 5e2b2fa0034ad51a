#include "environment.h"

#include "distrain/base/error.h"
#include "distrain/base/trace.h"

namespace distrain::scenario {

void Environments::play(uint64_t episode,
                        const std::function<Actions(const EnvironmentStates&)>& select,
                        const std::function<void(const EnvironmentStates&)>& report) {
  const base::TraceScope whole("episode", "episode", static_cast<int64_t>(episode));
  EnvironmentStates running, over;
  for (uint32_t e = 0; e < environments_.size(); ++e) {
    running.push_back({e, environments_[e].reset(base::Random({seed_, e, episode})), 0});
  }
  for (int64_t step = 1; !running.empty(); ++step) {
    const Actions actions = select(running);
    if (actions.size() != running.size()) {
      throw base::Exception(base::ErrorKind::kProtocol,
                            "the agent gave " + std::to_string(actions.size()) + " actions for " +
                                std::to_string(running.size()));
    }
    const base::TraceScope scope("environment", "step", step);
    EnvironmentStates left;
    for (size_t i = 0; i < actions.size(); ++i) {
      const uint32_t e = running[i].environment;
      const CartPole::Step result = environments_[e].step(actions[i]);
      const bool ends = result.over() || step == max_steps_;
      (ends ? over : left).push_back({e, result.observation, result.reward});
    }
    running = std::move(left);
  }
  report(over);
}

}  // namespace distrain::scenario
