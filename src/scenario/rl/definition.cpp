// distrain rl: its options and ranks.

#include <algorithm>

#include "distrain/job/training.h"
#include "distrain/scenario/rl.h"

namespace distrain::scenario {

RlOptions::RlOptions() {
  optimizer = "adam";
  checkpoint.every = 100;
}

void RlOptions::describe(job::OptionList<RlOptions>& list) {
  list.group("Environments");
  list.integer("observers", &RlOptions::observers, "observers; the job has one rank more")
      .range(1, 1023);
  list.integer("envs-per-observer", &RlOptions::envs_per_observer,
               "environments that an observer plays in side by side")
      .range(1, 1024);
  list.integer("max-steps", &RlOptions::max_steps, "steps of an environment in an episode")
      .range(1, job::kMaxInt);
  list.group("Training");
  list.real("gamma", &RlOptions::gamma, "what a reward of the next step counts").range(0, 1);
  list.real("threshold", &RlOptions::threshold, "solved when the running reward is above this")
      .range(-1e9, 1e9)
      .may_change();
  list.integer("max-episodes", &RlOptions::max_episodes,
               "give up after N episodes, with exit status 11; 0: never")
      .range(0, 1e12)
      .by_default("until it is solved")
      .of_predict()
      .step_limit();
  list.row("seed").help("of parameters, environments and actions");
  list.row("lr-schedule").help(lr_schedule_help("episodes"));
  list.row("log-interval").help("episodes between 'episode' lines; 0: none; auto: by time");
  list.row("checkpoint-every")
      .help("episodes between two saves; 0: at the end only")
      .by_default("");
  list.row("envs-per-observer").details("It asks for the actions of all in one call.");
  list.row("max-steps").details("CartPole itself ends after 500.");
  list.row("gamma").details("So much for each step that it is away.");
  list.row("max-episodes").details("Those before a resume count.");
  list.row("seed").details("An observer's environments have this plus its rank.");
  list.row("resume").details(
      R"(Observers, environments, seed, gamma and --max-steps have to be those that the job
was saved with.)");
}

const job::Definition<RlOptions>& rl_job() {
  using Use = cuda::DeviceRole::Use;
  using enum job::FieldType;
  using job::sometimes;
  static const auto kJob =
      job::define<RlOptions>("rl", "an agent learns CartPole from the episodes that observers play")
          .describe(
              R"(Balances a pole on a cart (CartPole-v1) by reinforcement learning: observers play, ask the
agent for each action over RPC, and after every episode the agent improves its policy by
REINFORCE. Rank 0 is the agent, ranks 1 to N are the observers.)")
          .details(
              R"(The agent answers all observers that wait in one forward pass of its policy: two linear layers
with 128 units between them, of which dropout takes three fifths away. When the episode is over
for all environments, it makes one step of Adam: returns are discounted over an environment's own
rewards, then normalised over all together.

The reward of an episode is that of the environment where it was smallest. The running reward, 5 %
of the last episode's and 95 % of what it was before, starts at 0; CartPole is solved when it is
above --threshold. Of ranks that were started one by one only the agent ends with exit status 11
when it is not.

`agent`, `observer1`, `observer2`, ... are the ranks' roles. All random numbers follow from the
seed, the observer, the environment, the episode and the step, so that two runs with the same
options are alike, whichever observer is faster, and so is one that was resumed. A signal is
heeded after the episode.

`distrain predict CHECKPOINT` plays ten episodes, or --max-episodes, with the action that the policy
finds likelier, and without dropout.)")
          .example(
              "distrain rl --log-interval 10 | jq -r 'select(.episode) | [.episode, "
              ".running_reward] | "
              "@tsv'",
              "How the reward grows")
          .example("distrain rl --observers 10 | jq 'select(.event == \"end\").requests_per_s'",
                   "Ten observers, and what the agent answers a second")
          .example("distrain rl --max-episodes 2000 || echo not solved",
                   "Whether it takes more than 2000")
          .example("for r in 0 1 2; do distrain rl --rank $r --world-size 3 & done; wait",
                   "Three ranks that are started one by one")
          .event("episode", "after an episode, of the agent, as --log-interval says",
                 {{"episode", kInteger, "from 1 on; those before a resume count"},
                  {"reward", kNumber, "of the environment where it was smallest"},
                  {"running_reward", kNumber, "the running mean of that"},
                  {"steps", kInteger, "of all environments in this episode"},
                  {"env_steps_per_s", kNumber,
                   "steps of environments a second since the last such line"},
                  {"requests_per_s", kNumber,
                   "questions of observers a second since the last such line"}})
          .event("end", "",
                 {sometimes({"episodes", kInteger, "those before a resume count"}),
                  sometimes({"solved", kFlag, "whether the running reward got above --threshold"}),
                  sometimes({"running_reward", kNumber, "after the last episode"}),
                  sometimes({"env_steps_per_s", kNumber, "steps of environments a second"}),
                  sometimes({"requests_per_s", kNumber, "questions of observers a second"}),
                  sometimes({"reward", kNumber, "mean of the episodes, by the command predict"})})
          .role("agent", 1, train_rl)
          .role("observer", &RlOptions::observers, {}, Use::kNone)
          .expose(expose_rl)
          .local(train_rl_local)
          .predict(predict_rl,
                   {{"reward", kNumber, "of the episode"}, {"steps", kInteger, "of the episode"}})
          .check([](const RlOptions& options, const job::Preflight&) {
            job::Plan::of_steps(options, options.max_episodes);
          })
          .change([](job::OptionTable& table) {
            const auto threads = std::ranges::find(table, "threads", &job::Option::name);
            threads->initial = "1";
            threads->initial_in_words.clear();
            threads->help += "; makes no difference here, where none is large enough";
          });
  return kJob;
}

}  // namespace distrain::scenario
