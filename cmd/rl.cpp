#include "rl.h"

#include "distrain/app/option_blocks.h"
#include "distrain/scenario/rl.h"

namespace distrain::cmd {

using namespace app;

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
  command.examples = {
      "distrain rl",
      "distrain rl --observers 3 | jq -c 'select(.event == \"end\") | {episodes, solved}'",
      "distrain rl --max-episodes 2000 || echo not solved",
      "for r in 0 1 2; do distrain rl --rank $r --world-size 3 & done; wait",
  };
  command.table = option_table();
  using Use = job::DeviceRole::Use;
  command.devices.roles = {{"agent", "", Use::kCompute}, {"observer", "", Use::kNone}};
  command.size = {"observers", 1};
  command.check = [](const ParsedOptions&, Placement&) {};
  command.role = [](const ParsedOptions&, int rank) { return scenario::rl_role(rank); };
  command.run = run_of<scenario::RlOptions>({rl_options, scenario::run_rl, scenario::run_rl_local});
  return command;
}

}  // namespace distrain::cmd
