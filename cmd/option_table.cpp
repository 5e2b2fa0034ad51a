#include "option_table.h"

#include <iterator>

namespace distrain::cmd {
namespace {

constexpr double kMaxInt = 2147483647.0;
constexpr double kMaxSeconds = 1e6;

Option integer(std::string name, std::string initial, double min, double max, std::string help) {
  Option option;
  option.name = std::move(name);
  option.kind = ValueKind::kInteger;
  option.value_name = "N";
  option.initial = std::move(initial);
  option.min = min;
  option.max = max;
  option.help = std::move(help);
  return option;
}

Option real(std::string name, std::string initial, double min, double max, std::string help) {
  Option option = integer(std::move(name), std::move(initial), min, max, std::move(help));
  option.kind = ValueKind::kReal;
  option.value_name = "X";
  return option;
}

Option seconds(std::string name, std::string initial, std::string help) {
  Option option = real(std::move(name), std::move(initial), 0, kMaxSeconds, std::move(help));
  option.value_name = "S";
  option.above_min = true;
  return option;
}

Option text(std::string name, std::string value_name, std::string help) {
  Option option;
  option.name = std::move(name);
  option.value_name = std::move(value_name);
  option.help = std::move(help);
  return option;
}

Option choice(std::string name, std::vector<std::string> choices, std::string help) {
  Option option = text(std::move(name), "NAME", std::move(help));
  option.kind = ValueKind::kChoice;
  option.initial = choices.front();
  option.choices = std::move(choices);
  return option;
}

Option flag(std::string name, std::string help) {
  Option option = text(std::move(name), "", std::move(help));
  option.kind = ValueKind::kFlag;
  return option;
}

void append(OptionTable& table, std::string group, Scope scope, OptionTable more) {
  for (Option& option : more) {
    option.group = group;
    option.scope = scope;
  }
  table.insert(table.end(), std::make_move_iterator(more.begin()),
               std::make_move_iterator(more.end()));
}

Option but(Option option, void (*change)(Option&)) {
  change(option);
  return option;
}

/// What every scenario has.
void append_common(OptionTable& table) {
  const auto random_free_port = [](Option& o) {
    o.initial = "";
    o.initial_in_words = "29500 when joining, any free port when spawning";
  };
  append(
      table, "Ranks", Scope::kPlacement,
      {flag("local", "the whole job in this process, without RPC: the reference"),
       but(integer("rank", "", 0, 1023, "be this one rank of a job whose others start elsewhere"),
           [](Option& o) { o.initial_in_words = "from the environment, if it names one"; }),
       text("ranks", "LIST", "start these ranks here (0-3 or 0,2-3), the others start elsewhere"),
       flag("spawn", "start every rank here, even when the environment names a rank"),
       but(integer("world-size", "", 1, 1024, "number of ranks; the size of the job follows"),
           [](Option& o) { o.initial_in_words = "follows from the options, or from rank 0"; }),
       but(text("master-addr", "HOST", "host of rank 0"),
           [](Option& o) { o.initial = "localhost"; }),
       but(integer("master-port", "", 1, 65535, "port of rank 0"), random_free_port)});
  append(table, "Network", Scope::kRank,
         {but(text("listen", "ADDR", "address to listen on"),
              [](Option& o) { o.initial_in_words = "the interface that reaches rank 0"; }),
          choice("transport", {"auto", "tcp", "unix"},
                 "between ranks; auto: a unix socket on one host, TCP between hosts"),
          seconds("rpc-timeout", "60", "deadline of one remote call"),
          seconds("join-timeout", "300", "how long to wait for all ranks"),
          seconds("peer-timeout", "5", "silence after which a rank counts as lost")});
  append(table, "Run", Scope::kRank,
         {but(integer("threads", "0", 0, 1024, "threads of one operation"),
              [](Option& o) { o.initial_in_words = "cores / ranks on this host"; }),
          but(flag("quiet", "no progress display"), [](Option& o) { o.short_name = 'q'; })});
  append(table, "Run", Scope::kInfo,
         {but(flag("help", "this text"), [](Option& o) { o.short_name = 'h'; }),
          but(flag("dump-options", "the option table as JSON"), [](Option& o) { o.hidden = true; }),
          but(flag("dump-placement", "which ranks would run where, as JSON"),
              [](Option& o) { o.hidden = true; })});
}

}  // namespace

OptionTable hybrid_option_table() {
  const auto random_only = [](Option& o) { o.random_only = true; };
  OptionTable table;
  append(
      table, "Model and data", Scope::kJob,
      {integer("trainers", "2", 1, 1022, "trainers; the job has two ranks more"),
       but(integer("num-embeddings", "100", 1, kMaxInt,
                   "rows of the embedding table (with --data: its words)"),
           random_only),
       integer("embedding-dim", "16", 1, 1048576, "numbers in a row"),
       but(integer("classes", "8", 1, 1048576, "classes (with --data: its labels)"), random_only)});
  append(table, "Model and data", Scope::kInput,
         {but(text("data", "FILE", "train on text: '__label__X word word ...', one example a line"),
              [](Option& o) { o.initial_in_words = "random batches"; }),
          text("test-data", "FILE", "evaluate on this file after training")});
  append(
      table, "Training", Scope::kJob,
      {integer("epochs", "100", 1, kMaxInt, "passes over the data"),
       but(integer("batches", "10", 1, kMaxInt, "batches an epoch and trainer, random data only"),
           random_only),
       but(integer("batch-size", "32", 1, kMaxInt, "examples a batch and trainer, with --data"),
           [](Option& o) { o.data_only = true; }),
       real("lr", "0.05", 0, 1e6, "learning rate"),
       choice("optimizer", {"sgd", "adagrad", "adam"}, "of all parameters, remote and local"),
       choice("mode", {"async", "sync"},
              "async: each trainer's update as it comes; sync: one mean update a step"),
       integer("seed", "1", 0, 9007199254740991.0, "of parameters, data and shuffling"),
       but(integer("log-interval", "0", 0, kMaxInt, "steps between 'step' lines"),
           [](Option& o) { o.initial_in_words = "once an epoch"; })});
  append_common(table);
  return table;
}

}  // namespace distrain::cmd
