// distrain rl: observers play CartPole and ask an agent for each action; the agent learns from
// their episodes by REINFORCE.
//
// After PyTorch's tutorial "Getting Started with Distributed RPC Framework" (its first part).
//
//   agent (main thread)       agent (workers)        observer (worker)
//     run_episode ------------------------------------> plays …
//     waits                     select_actions <------- … asks, waits
//                               one pass for all
//                               that wait ------------> … makes a step
//                               report_rewards <------- … is done
//     learns <----------------------------------------- the call returns
//
// A call of run_episode takes as long as an episode, so it has no deadline: it ends when the
// episode does or the observer is lost. An observer's question ends when the agent answers or is
// lost, or by its deadline, --rpc-timeout, which then ends the job. Between two episodes nobody
// asks, so the parameters never change during a pass.

#include "distrain/scenario/rl.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "distrain/job/session.h"
#include "distrain/rpc/batcher.h"
#include "host.h"
#include "observer.h"

namespace distrain::scenario {

namespace {

constexpr int kAgent = 0;

/// What the observers call, on rank 0.
class PolicyAgent {
 public:
  PolicyAgent(std::shared_ptr<RlHost> host, base::Executor& executor)
      : host_(std::move(host)), batcher_(executor, [this](const std::vector<ActionRequest>& all) {
          return host_->choose(all);
        }) {}

  base::Future<Actions> select_actions(rpc::CallContext& call,
                                       std::vector<EnvironmentState> states) {
    ActionRequest request{call.caller.rank - 1, std::move(states)};
    host_->check(request);  // here, so that it does not spoil the pass for others
    return batcher_.ask(std::move(request));
  }
  void report_rewards(rpc::CallContext& call, const std::vector<FinalReward>& rewards) {
    host_->report(call.caller.rank - 1, rewards);
  }

 private:
  const std::shared_ptr<RlHost> host_;
  rpc::Batcher<ActionRequest, Actions> batcher_;
};

/// What the observers have of their job beside their Observer.
struct ObserverJob {
  std::shared_ptr<job::StopSignal> stop;
  bool saves = false;  ///< the job does
  std::atomic<bool> stopped{false};
};

/// Made by the agent on each of the other ranks.
class Observer {
 public:
  using Constructor = Observer(rpc::RRef<PolicyAgent> agent, uint64_t seed, int64_t environments,
                               int64_t max_steps);
  Observer(rpc::RRef<PolicyAgent> agent, uint64_t seed, int64_t environments, int64_t max_steps)
      : agent_(std::move(agent)), environments_(seed, environments, max_steps) {}

  /// Gives back whether this rank was told to stop.
  bool run_episode(rpc::CallContext& call, int64_t episode) {
    const auto& job = call.agent.local<ObserverJob>();
    if (job.saves) job.stop->arm();  // not before there is something to save
    environments_.play(
        static_cast<uint64_t>(episode),
        [this](const std::vector<EnvironmentState>& states) {
          return agent_.rpc_sync<&PolicyAgent::select_actions>(states);
        },
        [this](const std::vector<FinalReward>& rewards) {
          agent_.rpc_sync<&PolicyAgent::report_rewards>(rewards);
        });
    return job.stop->requested();
  }

  /// There is no further episode. `stopped`: some rank was told to stop.
  void end(rpc::CallContext& call, bool stopped) {
    auto& job = call.agent.local<ObserverJob>();
    job.stop->disarm(stopped);
    job.stopped = stopped || job.stop->requested();
  }

 private:
  const rpc::RRef<PolicyAgent> agent_;
  ObservedEnvironments environments_;
};

void run_agent(rpc::Agent& agent, const RlOptions& options, const std::shared_ptr<RlHost>& host,
               job::StopSignal& stop) {
  const auto self = agent.make_rref(std::make_shared<PolicyAgent>(host, agent.executor()));
  std::vector<rpc::RRef<Observer>> observers;
  for (int rank = 1; rank <= options.observers; ++rank) {
    observers.push_back(agent.remote_new<Observer>(rank, self,
                                                   options.seed + static_cast<uint64_t>(rank),
                                                   options.envs_per_observer, options.max_steps));
  }
  while (host->state() == RlHost::State::kTraining) {
    const int64_t episode = host->begin_episode();
    std::vector<base::Future<bool>> episodes;
    for (const auto& observer : observers) {
      episodes.push_back(agent.rpc_async<&Observer::run_episode>(
          rpc::To(observer.owner()).without_deadline(), observer, episode));
    }
    base::wait_all(episodes);
    host->end_episode(std::any_of(episodes.begin(), episodes.end(),
                                  [](const auto& told_to_stop) { return told_to_stop.wait(); }));
  }
  stop.disarm(host->stopped());  // all is saved, or there was nothing left to do
  for (const auto& observer : observers) observer.rpc_sync<&Observer::end>(host->stopped());
}

}  // namespace

int rl_world_size(const RlOptions& options) { return options.observers + 1; }

std::string rl_role(int rank) {
  return rank == kAgent ? "agent" : "observer" + std::to_string(rank);
}

job::Outcome run_rl(const RlOptions& own, const job::Job& job,
                    const std::function<RlOptions(const job::OptionMap&)>& adopt,
                    job::EventSink& sink) {
  std::vector<std::string> names;
  for (int rank = 0; rank < rl_world_size(own); ++rank) names.push_back(rl_role(rank));
  job::Session session(job, std::move(names), sink);
  rpc::Agent& agent = session.agent();
  agent.expose<&PolicyAgent::select_actions>("PolicyAgent.select_actions");
  agent.expose<&PolicyAgent::report_rewards>("PolicyAgent.report_rewards");
  agent.expose_class<Observer>("Observer");
  agent.expose<&Observer::run_episode>("Observer.run_episode");
  agent.expose<&Observer::end>("Observer.end");

  RlOptions options = own;
  std::shared_ptr<RlHost> host;
  std::shared_ptr<ObserverJob> observed;
  const auto prepare = [&] {
    if (job.rank != kAgent) {
      options = adopt(agent.job_options());
      observed = std::make_shared<ObserverJob>(job.stop, !options.checkpoint.dir.empty());
      agent.provide(observed);
    } else {
      // Before the others are there: what is wrong with the folder is known at once.
      host = std::make_shared<RlHost>(options, session.job(), sink);
    }
  };
  const auto work = [&] {
    if (job.rank != kAgent) return;  // it plays while it waits for the agent in the shutdown
    if (!options.checkpoint.dir.empty()) job.stop->arm();
    host->start();
    run_agent(agent, options, host, *job.stop);
  };
  job::Outcome outcome;
  session.run(prepare, work, outcome);
  if (host) {
    host->add_to(outcome);
  } else {
    outcome.stopped = observed->stopped;
  }
  return outcome;
}

}  // namespace distrain::scenario
