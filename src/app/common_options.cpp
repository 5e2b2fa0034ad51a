#include "common_options.h"

#include <algorithm>
#include <iterator>

#include "distrain/base/error.h"

namespace distrain::app {
namespace {

constexpr double kMaxSeconds = 1e6;

Option real(std::string name, std::string initial, double min, double max, std::string help) {
  Option option = integer(std::move(name), std::move(initial), min, max, std::move(help));
  option.kind = ValueKind::kReal;
  option.value_name = "X";
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
  option.initial = "false";
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

Option by_default(Option option, std::string words) {
  option.initial_in_words = std::move(words);
  return option;
}

void describe(OptionTable& table,
              const std::vector<std::pair<std::string_view, std::string_view>>& details) {
  for (const auto& [name, text] : details) {
    const auto option = std::find_if(table.begin(), table.end(),
                                     [name](const Option& each) { return each.name == name; });
    if (option == table.end()) {
      throw base::Exception(base::ErrorKind::kInternal, "no option is named " + std::string(name));
    }
    if (!option->details.empty()) option->details += '\n';
    option->details += text;
  }
}

}  // namespace

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

Option seconds(std::string name, std::string initial, std::string help) {
  Option option = real(std::move(name), std::move(initial), 0, kMaxSeconds, std::move(help));
  option.value_name = "S";
  option.above_min = true;
  return option;
}

void append_common(OptionTable& table) {
  append(
      table, "Ranks", Scope::kPlacement,
      {flag("local", "the whole job in this process, without RPC: the reference"),
       by_default(
           integer("rank", "", 0, 1023, "be this one rank of a job whose others start elsewhere"),
           "from the environment, if it names one"),
       text("ranks", "LIST", "start these ranks here (0-3 or 0,2-3), the others start elsewhere"),
       flag("spawn", "start every rank here, even when the environment names a rank"),
       by_default(
           integer("world-size", "", 1, 1024, "number of ranks; the size of the job follows"),
           "follows from the options, or from rank 0"),
       but(text("master-addr", "HOST", "host of rank 0"),
           [](Option& o) { o.initial = "localhost"; }),
       by_default(integer("master-port", "", 1, 65535, "port of rank 0"),
                  "29500 when joining, any free port when spawning")});
  append(table, "Network", Scope::kRank,
         {by_default(text("listen", "ADDR", "address to listen on"),
                     "the interface that reaches rank 0"),
          choice("transport", {"auto", "tcp", "unix"},
                 "between ranks; auto: a unix socket on one host, TCP between hosts"),
          seconds("rpc-timeout", "60", "deadline of one remote call, in seconds"),
          seconds("join-timeout", "300", "how long to wait for all ranks, in seconds"),
          seconds("peer-timeout", "5", "seconds of silence after which a rank counts as lost")});
  append(table, "Run", Scope::kInput,
         {but(text("device", "DEVICE",
                   "where ranks compute: cpu, cuda (each host's GPUs in turn), cuda:N, or "
                   "ROLE=DEVICE[,...], the other roles on the CPU"),
              [](Option& o) {
                o.initial = "cpu";
                o.choices = {"cpu", "cuda"};
              })});
  append(table, "Run", Scope::kJob,
         {text("trace", "FILE", "write what all ranks did here, for ui.perfetto.dev")});
  append(table, "Run", Scope::kRank,
         {by_default(integer("threads", "0", 0, 1024, "threads of one operation"),
                     "cores / ranks on this host"),
          text("inject", "FAULT[,...]",
               "try a fault: delay=50ms@rank=2 (before each call of that rank; us, ms or s), "
               "fail=checkpoint.3 (die at the 3rd system call of the first save)"),
          but(flag("quiet", "no progress display"), [](Option& o) { o.short_name = 'q'; })});
  append(table, "Run", Scope::kInfo,
         {but(flag("help", "a summary of the options"), [](Option& o) { o.short_name = 'h'; }),
          but(flag("dump-placement", "which ranks would run where, as JSON"),
              [](Option& o) { o.hidden = true; })});
  describe(
      table,
      {{"local", "The same model, the same batches, the same lines."},
       {"world-size",
        "The option that sets the number of ranks follows from it, and the other way "
        "round."},
       {"device",
        "`cuda` is the GPU of the local rank where torchrun, mpirun or srun says which that is, "
        "else\nthe GPUs in turn; ranks may share one. A rank that joins may name its own, "
        "otherwise "
        "what rank 0\nwas given holds."},
       {"trace", "On rank 0's machine; see TRACES in the program's own page."},
       {"inject",
        "Without `@rank` every rank is delayed. Of `fail=checkpoint.N` rank 0 dies, at the Nth "
        "system\ncall of its first save."}});
}

}  // namespace distrain::app
