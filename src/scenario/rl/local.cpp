// distrain rl --local: the same episodes and updates in one process, without RPC.

#include "distrain/job/local_trainers.h"
#include "distrain/scenario/rl.h"
#include "host.h"
#include "observer.h"

namespace distrain::scenario {

job::Outcome run_rl_local(const RlOptions& options, const job::Job& job, job::EventSink& sink) {
  if (!options.checkpoint.dir.empty()) job.stop->arm();
  RlHost host(options, job, sink);
  host.start();
  std::vector<ObservedEnvironments> observers;
  for (int rank = 1; rank <= options.observers; ++rank) {
    observers.emplace_back(options.seed + static_cast<uint64_t>(rank), options.envs_per_observer,
                           options.max_steps);
  }
  while (host.state() == RlHost::State::kTraining) {
    const auto episode = static_cast<uint64_t>(host.begin_episode());
    // One after the other: no action depends on what is asked together with it.
    for (int o = 0; o < options.observers; ++o) {
      observers[static_cast<size_t>(o)].play(
          episode,
          [&host, o](const std::vector<EnvironmentState>& states) {
            return host.choose({{o, states}}).at(0);
          },
          [&host, o](const std::vector<FinalReward>& rewards) { host.report(o, rewards); });
    }
    host.end_episode(false);
  }
  job.stop->disarm(host.stopped());  // all is saved, or there was nothing left to do
  job::Outcome outcome;
  host.add_to(outcome);
  return job::without_rpc(std::move(outcome));
}

}  // namespace distrain::scenario
