#include "observer.h"

#include "distrain/base/error.h"
#include "distrain/base/trace.h"

namespace distrain::scenario {

void ObservedEnvironments::play(uint64_t episode, const SelectActions& select,
                                const ReportRewards& report) {
  const base::TraceScope whole("episode", "episode", static_cast<int64_t>(episode));
  std::vector<EnvironmentState> running;
  for (uint32_t e = 0; e < environments_.size(); ++e) {
    running.push_back({e, environments_[e].reset({seed_, e, episode}), 0});
  }
  std::vector<FinalReward> last;
  for (int64_t step = 1; !running.empty(); ++step) {
    const Actions actions = select(running);
    if (actions.size() != running.size()) {
      throw base::Exception(base::ErrorKind::kProtocol,
                            "the agent gave " + std::to_string(actions.size()) + " actions for " +
                                std::to_string(running.size()));
    }
    const base::TraceScope scope("environment", "step", step);
    size_t left = 0;
    for (size_t i = 0; i < actions.size(); ++i) {
      const uint32_t e = running[i].environment;
      const EnvironmentStep result = environments_[e].step(actions[i]);
      if (result.over() || step == max_steps_) {
        last.push_back({e, result.reward});
      } else {
        running[left++] = {e, result.observation, result.reward};
      }
    }
    running.resize(left);
  }
  report(last);
}

}  // namespace distrain::scenario
