// distrain rl: observers play CartPole and ask an agent for each action; it learns by REINFORCE.
//
// After PyTorch's tutorial "Getting Started with Distributed RPC Framework" (its first part).
//
//   agent (main thread)       agent (workers)        observer (worker)
//     run_episode ------------------------------------> plays …
//     waits                     select_actions <------- … asks, waits
//                               one pass for all
//                               waiting requests -----> … makes a step
//                               report_rewards <------- … is done
//     learns <----------------------------------------- the call returns
//
// A call of run_episode takes as long as an episode, so it has no deadline: it ends with the
// episode or when the observer is lost. A request for actions ends when the agent answers or is
// lost, or at its deadline, --rpc-timeout, which then ends the job. There are no requests between
// episodes, so the parameters never change during a pass.

#include "rl.h"

#include "distrain/base/trace.h"
#include "distrain/rpc/batcher.h"

namespace distrain::scenario {

namespace {

/// The object on rank 0 that the observers call.
class PolicyAgent {
 public:
  PolicyAgent(std::shared_ptr<Learner> learner, base::Executor& executor)
      : learner_(std::move(learner)),
        batcher_(executor,
                 [this](const std::vector<ActionRequest>& all) { return learner_->choose(all); }) {}

  base::Future<Actions> select_actions(rpc::CallContext& call, EnvironmentStates states) {
    ActionRequest request{call.caller.rank - 1, std::move(states)};
    learner_->check(request);  // here, so that an invalid request does not fail the pass for others
    return batcher_.ask(std::move(request));
  }
  void report_rewards(rpc::CallContext& call, const EnvironmentStates& ends) {
    learner_->report(call.caller.rank - 1, ends);
  }

 private:
  const std::shared_ptr<Learner> learner_;
  rpc::Batcher<ActionRequest, Actions> batcher_;
};

/// Plays episodes. The agent creates one Observer on each other rank.
class Observer {
 public:
  using Constructor = Observer(rpc::RRef<PolicyAgent> agent, uint64_t seed, int64_t environments,
                               int64_t max_steps);
  Observer(rpc::RRef<PolicyAgent> agent, uint64_t seed, int64_t environments, int64_t max_steps)
      : agent_(std::move(agent)), environments_(seed, environments, max_steps) {}

  void run_episode(int64_t episode) {
    const base::TraceScope scope("episode", "episode", episode);
    const auto ends = environments_.play(episode, [this](const EnvironmentStates& states) {
      return agent_.rpc_sync<&PolicyAgent::select_actions>(states);
    });
    agent_.rpc_sync<&PolicyAgent::report_rewards>(ends);
  }

 private:
  const rpc::RRef<PolicyAgent> agent_;
  Environments environments_;
};

/// Trains `learner` to the end of the job. `play` plays an episode in all environments.
void train(auto& training, Learner& learner, job::Process& process,
           const std::function<void(int64_t episode)>& play) {
  learner.keep_in(training);
  training.end_when([&] { return learner.solved(); });
  training.run([&](const auto&) {
    const int64_t episode = training.steps_made() + 1;
    learner.begin_episode(episode);
    play(episode);
    return learner.end_episode();
  });
  learner.add_to(process.fields(), training.steps_made());
  if (!learner.solved()) process.miss_goal(learner.what_is_missing(training.steps_made()));
}

}  // namespace

void expose_rl(rpc::Agent& agent) {
  agent.expose<&PolicyAgent::select_actions>("PolicyAgent.select_actions");
  agent.expose<&PolicyAgent::report_rewards>("PolicyAgent.report_rewards");
  agent.expose_class<Observer>("Observer");
  agent.expose<&Observer::run_episode>("Observer.run_episode");
}

void train_rl(job::Rank& rank, const RlOptions& options) {
  rpc::Agent& agent = rank.agent();
  const auto learner = std::make_shared<Learner>(options, rank.device(), rank.sink());
  const auto self = agent.make_rref(std::make_shared<PolicyAgent>(learner, agent.executor()));
  std::vector<rpc::RRef<Observer>> observers;
  for (int observer = 1; observer <= options.observers; ++observer) {
    observers.push_back(agent.remote_new<Observer>(observer, self,
                                                   options.seed + static_cast<uint64_t>(observer),
                                                   options.envs_per_observer, options.max_steps));
  }

  job::Training training(rank,
                         job::Plan::of_steps(options, options.max_episodes, "--max-episodes"));
  train(training, *learner, rank, [&](int64_t episode) {
    std::vector<base::Future<void>> episodes;
    for (const auto& observer : observers) {
      episodes.push_back(agent.rpc_async<&Observer::run_episode>(
          rpc::To(observer.owner()).without_deadline(), observer, episode));
    }
    base::wait_all(episodes);
  });
}

void train_rl_local(job::SingleProcess& local, const RlOptions& options) {
  Learner learner(options, local.device(), local.sink());
  std::vector<Environments> observers;
  for (int rank = 1; rank <= options.observers; ++rank) {
    observers.emplace_back(options.seed + static_cast<uint64_t>(rank), options.envs_per_observer,
                           options.max_steps);
  }
  job::SingleProcessTraining training(
      local, job::Plan::of_steps(options, options.max_episodes, "--max-episodes"));
  train(training, learner, local, [&](int64_t episode) {
    // Observers may play in turn: an action does not depend on other requests to one choose().
    for (int o = 0; o < options.observers; ++o) {
      const base::TraceScope scope("episode", "episode", episode);
      Environments& environments = observers[static_cast<size_t>(o)];
      learner.report(o, environments.play(episode, [&](const EnvironmentStates& states) {
        return learner.choose({{o, states}}).at(0);
      }));
    }
  });
}

void predict_rl(job::Predictions& predictions, const RlOptions& options) {
  if (predictions.input() != job::kStandardInput) {
    base::invalid("predict takes no FILE for rl, because it plays episodes");
  }
  constexpr int64_t kEpisodes = 10;
  const int64_t episodes = options.max_episodes > 0 ? options.max_episodes : kEpisodes;
  Policy policy(options.seed, predictions.device());
  predictions.load(policy.named_parameters());
  Environments environment(options.seed, 1, options.max_steps);  // training uses seed + rank
  double total = 0;
  for (int64_t episode = 1; episode <= episodes; ++episode) {
    const base::TraceScope scope("episode", "episode", episode);
    double reward = 0;
    int64_t steps = 0;
    const auto ends = environment.play(episode, [&](const EnvironmentStates& states) {
      ++steps;
      reward += states[0].last_reward;
      return Actions{policy.best(states[0].observation)};
    });
    reward += ends[0].last_reward;
    predictions.tell({{"reward", reward}, {"steps", steps}});
    total += reward;
  }
  predictions.add("reward", total / static_cast<double>(episodes));
}

}  // namespace distrain::scenario
