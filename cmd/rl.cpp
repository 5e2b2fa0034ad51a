// distrain rl: its options, roles and help.

#include <algorithm>

#include "distrain/job/training.h"
#include "jobs.h"

namespace distrain {

using namespace scenario;

void RlOptions::describe(job::OptionList<RlOptions>& list) {
  list.group("Environments");
  list.integer("observers", &RlOptions::observers, "run N observers; the job has N + 1 ranks")
      .range(1, 1023);
  list.integer("envs-per-observer", &RlOptions::envs_per_observer,
               "let each observer play in N environments at the same time")
      .range(1, 1024);
  list.integer("max-steps", &RlOptions::max_steps, "end an environment's episode after N steps")
      .range(1, job::kMaxInt);
  list.group("Training");
  list.real("gamma", &RlOptions::gamma, "discount rewards by the factor X per step").range(0, 1);
  list.real("threshold", &RlOptions::threshold, "stop when the running reward exceeds X")
      .range(-1e9, 1e9)
      .may_change();
  list.integer("max-episodes", &RlOptions::max_episodes,
               "give up after N episodes, with exit status 11; 0 never gives up")
      .range(0, 1e12)
      .of_predict()
      .step_limit();
  list.row("seed").help("seed the parameters, environments and actions");
  list.row("lr-schedule").help(lr_schedule_help("episodes"));
  list.row("log-interval")
      .help("print a line every N episodes; 0 prints none; auto prints one every 5 s");
  list.row("checkpoint-every").help("save every N episodes; 0 saves only at the end");
  list.row("envs-per-observer").details("One call asks for the actions of all of them.");
  list.row("max-steps").details("CartPole-v1 ends after 500 steps in any case.");
  list.row("max-episodes").details("Episodes before a resume count.");
  list.row("seed").details("The environments of an observer use N plus its rank.");
  list.row("resume").details(
      "--observers, --envs-per-observer, --seed, --gamma and --max-steps cannot be changed.");
}

const job::Definition<RlOptions>& cmd::rl_job() {
  static const auto kJob =
      job::define<RlOptions>("rl", "train an agent on CartPole from the episodes of observers")
          .describe(
              R"(Balances a pole on a cart (CartPole-v1) by reinforcement learning. Observers
play and ask the agent for each action over RPC; after each episode the agent
updates its policy with REINFORCE. Rank 0 is the agent, and ranks 1 to N are the
observers.)")
          .details(
              R"(The agent answers all waiting observers with one forward pass of its policy: two linear layers with
128 hidden units and a dropout of 0.6. When the episode has ended in all environments, the agent
makes one optimizer step. Returns are discounted within each environment and normalised over all
environments.

The reward of an episode is the smallest reward of any environment. The running reward starts at 0
and moves 5 % towards the reward of each episode. CartPole is solved when the running reward is
above --threshold. If it is not solved, the job ends with exit status 11; if ranks were started one
by one, only the agent does.

The ranks' roles are `agent`, `observer1`, `observer2`, .... All random numbers are derived from the
seed, the observer, the environment, the episode and the step. Two runs with the same options
therefore give the same results, and so does a resumed run. After a signal, a job with --checkpoint
finishes its episode.

`distrain predict CHECKPOINT` plays ten episodes, or --max-episodes. It always takes the likelier
action and uses no dropout.)")
          .example(
              "distrain rl --log-interval 10 | jq -r 'select(.episode) | [.episode, "
              ".running_reward] | @tsv'",
              "Watch the reward grow")
          .example("distrain rl --observers 10 | jq 'select(.event == \"end\").requests_per_s'",
                   "Measure the requests per second of ten observers")
          .example("distrain rl --max-episodes 2000 || echo not solved",
                   "Check that 2000 episodes are enough")
          .example("for r in 0 1 2; do distrain rl --rank $r --world-size 3 & done; wait",
                   "Start three ranks one by one")
          .event("episode", "printed after an episode, as --log-interval says",
                 {{"episode", kInteger, "number of the episode since the job's first start"},
                  {"reward", kNumber, "smallest reward of any environment"},
                  {"running_reward", kNumber, "running mean of the reward"},
                  {"steps", kInteger, "steps of all environments in this episode"},
                  {"env_steps_per_s", kNumber,
                   "environment steps per second since the last such line"},
                  {"requests_per_s", kNumber,
                   "requests for actions per second since the last such line"}})
          .event(
              "end", "",
              {sometimes({"episodes", kInteger, "number of episodes since the job's first start"}),
               sometimes({"solved", kFlag, "whether the running reward got above --threshold"}),
               sometimes({"running_reward", kNumber, "running reward after the last episode"}),
               sometimes({"env_steps_per_s", kNumber, "environment steps per second"}),
               sometimes({"requests_per_s", kNumber, "requests for actions per second"}),
               sometimes({"reward", kNumber, "mean reward of the episodes of predict"})})
          .role("agent", 1, train_rl)
          .role("observer", &RlOptions::observers, {}, Use::kNone)
          .expose(expose_rl)
          .local(train_rl_local)
          .predict(predict_rl, {{"reward", kNumber, "reward of the episode"},
                                {"steps", kInteger, "steps of the episode"}})
          .check([](const RlOptions& options, const job::Preflight&) {
            job::Plan::of_steps(options, options.max_episodes);
          })
          .change([](job::OptionTable& table) {
            const auto threads = std::ranges::find(table, "threads", &job::Option::name);
            threads->initial = "1";
            threads->initial_in_words.clear();
            threads->help += "; rl gains nothing from more than 1";
          });
  return kJob;
}

}  // namespace distrain
