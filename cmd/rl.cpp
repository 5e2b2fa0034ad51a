#include "rl.h"

#include "distrain/app/option_blocks.h"
#include "distrain/scenario/rl.h"

namespace distrain::cmd {

using namespace app;
using job::sometimes;
using enum job::FieldType;

namespace {

OptionTable option_table() {
  OptionTable table;
  append(table, "Environments", Scope::kJob,
         {integer("observers", "1", 1, 1023, "observers; the job has one rank more"),
          integer("envs-per-observer", "1", 1, 1024,
                  "environments that an observer plays in side by side"),
          integer("max-steps", "10000", 1, kMaxInt, "steps of an environment in an episode")});
  append(table, "Training", Scope::kJob,
         {real("gamma", "0.99", 0, 1, "what a reward of the next step counts"),
          real("lr", "0.01", 0, 1e6, "learning rate of Adam"),
          real("threshold", "475", -1e9, 1e9, "solved when the running reward is above this"),
          by_default(integer("max-episodes", "0", 0, 1e12,
                             "give up after N episodes, with exit status 11; 0: never"),
                     "until it is solved"),
          seed_option("of parameters, environments and actions"),
          log_interval_option("10", "episode", "none")});
  append_checkpoints(table, "episodes", "at the end only", "100");
  append_common(table);
  change(table, "threads", [](Option& o) {
    o.initial = "1";
    o.initial_in_words.clear();
    o.help += "; makes no difference here, where none is large enough";
  });
  return table;
}

scenario::RlOptions rl_options(const ParsedOptions& parsed) {
  auto options = common_options<scenario::RlOptions>(parsed);
  options.observers = parsed.whole("observers");
  options.envs_per_observer = parsed.whole("envs-per-observer");
  options.max_steps = parsed.integer("max-steps");
  options.gamma = parsed.real("gamma");
  options.lr = parsed.real("lr");
  options.threshold = parsed.real("threshold");
  options.max_episodes = parsed.integer("max-episodes");
  return options;
}

}  // namespace

JobCommand rl_command() {
  JobCommand command;
  command.line = {"rl", "an agent learns CartPole from the episodes that observers play"};
  command.description =
      "Balances a pole on a cart (CartPole-v1) by reinforcement learning: observers play, ask the\n"
      "agent for each action over RPC, and after every episode the agent improves its policy by\n"
      "REINFORCE. Rank 0 is the agent, ranks 1 to N are the observers.";
  command.details =
      "The agent answers all observers that wait in one forward pass of its policy: two linear "
      "layers\n"
      "with 128 units between them, of which dropout takes three fifths away. When the episode is "
      "over\n"
      "for all environments, it makes one step of Adam: returns are discounted over an "
      "environment's own\n"
      "rewards, then normalised over all together.\n"
      "\n"
      "The reward of an episode is that of the environment where it was smallest. The running "
      "reward, 5 %\n"
      "of the last episode's and 95 % of what it was before, starts at 0; CartPole is solved when "
      "it is\n"
      "above --threshold. Of ranks that were started one by one only the agent ends with exit "
      "status 11\n"
      "when it is not.\n"
      "\n"
      "`agent`, `observer1`, `observer2`, ... are the ranks' roles. All random numbers follow from "
      "the\n"
      "seed, the observer, the environment, the episode and the step, so that two runs with the "
      "same\n"
      "options are alike, whichever observer is faster, and so is one that was resumed. A signal "
      "is\n"
      "heeded after the episode.";
  command.examples = {
      {"distrain rl | jq -r 'select(.event == \"episode\") | [.episode, .running_reward] | @tsv'",
       "How the reward grows"},
      {"distrain rl --observers 10 | jq 'select(.event == \"end\").requests_per_s'",
       "Ten observers, and what the agent answers a second"},
      {"distrain rl --max-episodes 2000 || echo not solved", "Whether it takes more than 2000"},
      {"for r in 0 1 2; do distrain rl --rank $r --world-size 3 & done; wait",
       "Three ranks that are started one by one"},
  };
  command.table = option_table();
  describe(command.table,
           {{"envs-per-observer", "It asks for the actions of all in one call."},
            {"max-steps", "CartPole itself ends after 500."},
            {"gamma", "So much for each step that it is away."},
            {"max-episodes", "Those before a resume count."},
            {"seed", "An observer's environments have this plus its rank."},
            {"resume",
             "Observers, environments, seed, gamma and --max-steps have to be those that the job\n"
             "was saved with."}});
  command.events = {
      {"episode",
       "every --log-interval episodes, of the agent",
       {{"episode", kInteger, "from 1 on; those before a resume count"},
        {"reward", kNumber, "of the environment where it was smallest"},
        {"running_reward", kNumber, "the running mean of that"},
        {"steps", kInteger, "of all environments in this episode"},
        {"env_steps_per_s", kNumber, "steps of environments a second since the last such line"},
        {"requests_per_s", kNumber, "questions of observers a second since the last such line"}}},
      {"end",
       "",
       {sometimes({"episodes", kInteger, "those before a resume count"}),
        sometimes({"solved", kFlag, "whether the running reward got above --threshold"}),
        sometimes({"running_reward", kNumber, "after the last episode"}),
        sometimes({"env_steps_per_s", kNumber, "steps of environments a second"}),
        sometimes({"requests_per_s", kNumber, "questions of observers a second"})}}};
  using Use = job::DeviceRole::Use;
  command.devices.roles = {{"agent", "", Use::kCompute}, {"observer", "", Use::kNone}};
  command.size = {"observers", 1};
  command.check = [](const ParsedOptions&, Placement&) {};
  command.role = [](const ParsedOptions&, int rank) { return scenario::rl_role(rank); };
  command.run = run_of<scenario::RlOptions>({rl_options, scenario::run_rl, scenario::run_rl_local});
  return command;
}

}  // namespace distrain::cmd
