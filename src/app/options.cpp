#include <algorithm>
#include <set>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "distrain/base/text.h"
#include "program.h"

namespace distrain::app {
namespace {

void append_common(OptionTable& table) {
  using enum ValueKind;
  const char* group = "Ranks";
  Scope scope = Scope::kPlacement;
  const auto add = [&](const char* name, ValueKind kind, const char* value_name,
                       const char* initial, const char* help) {
    table.push_back({.name = name,
                     .kind = kind,
                     .value_name = value_name,
                     .initial = initial,
                     .scope = scope,
                     .group = group,
                     .help = help});
    return job::OptionRow(table.back());
  };
  const auto flag = [&](const char* name, const char* help, char short_name = 0) {
    add(name, kFlag, "", "false", help);
    table.back().short_name = short_name;
    return job::OptionRow(table.back());
  };
  const auto duration = [&](const char* name, const char* initial, const char* help) {
    add(name, kReal, "TIME", initial, help);
    table.back().is_duration = true;
    return job::OptionRow(table.back()).range(0, 1e6);
  };
  flag("local", "run the whole job in this process, without RPC, as a reference")
      .details("The model, the batches and the output lines are those of the distributed job.");
  add("rank", kInteger, "N|auto", "",
      "run only rank N of a job whose other ranks start elsewhere; auto takes a free rank")
      .range(0, 1023)
      .offers({"auto"})
      .by_default("from the environment, if it names one")
      .details(
          R"(With `auto`, rank 0 assigns a rank that no other process has: one that has not joined yet, or one
that was lost while the job continues without it. The process waits up to --join-timeout for a rank.)");
  add("ranks", kText, "LIST", "",
      "start only these ranks here, such as 0-3 or 0,2-3; the other ranks start elsewhere");
  flag("spawn", "start every rank here, even if the environment names a rank");
  add("world-size", kInteger, "N", "", "run N ranks in total")
      .range(1, 1024)
      .by_default("from the job's options, or from rank 0")
      .details("This also sets the job's own option for a number of ranks, such as --trainers.");
  add("master-addr", kText, "HOST", "localhost", "reach rank 0 at HOST");
  add("master-port", kInteger, "N", "", "reach rank 0 at port N")
      .range(1, 65535)
      .by_default(
          "a free port if all ranks start here, otherwise derived from the job id or 29500");

  group = "Checkpoints";
  add("max-restarts", kInteger, "N", "0", "restart the ranks up to N times after a rank is lost")
      .range(0, 1'000'000)
      .details(
          R"(If a rank is killed, is lost or runs out of a resource such as memory, all ranks restart from the newest
checkpoint. If the job continues without a lost trainer, only that trainer restarts. On several machines,
give this option to every launcher, because each one restarts its own ranks. The launcher with rank 0
needs --checkpoint, unless the job can continue without a lost trainer. Without a checkpoint, only a lost
trainer restarts; the loss of a rank that does not train ends the job.)");
  duration("save-timeout", "60",
           "after a signal, kill the ranks if a save makes no progress for TIME")
      .above(0, 1e6)
      .needs("checkpoint")
      .details("The launcher of rank 0 applies it. A step in progress has as long to end.");

  group = "Network";
  scope = Scope::kRank;
  add("listen", kText, "ADDR", "", "listen on ADDR")
      .by_default("the interface that reaches rank 0")
      .details(
          R"(Rank 0 listens on the address of --master-addr, which must belong to its host. If other ranks reach
rank 0 through another address, such as that of a container's host, use `--listen 0.0.0.0`.)");
  add("port-range", kText, "A-B", "", "listen on ports from A to B")
      .by_default("any free port")
      .details("Rank 0 uses it only if all ranks start here; otherwise others must know its port.");
  add("token-file", kText, "FILE", "",
      "admit only ranks that know the token in FILE (mode 0600, the same on each host)")
      .by_default("admit ranks of this user on this host")
      .details(
          R"(Ranks of several hosts or several users need a token; each rank proves to the others that it knows
the token. `(umask 077; head -c 32 /dev/urandom | base64 > job.token)` creates one. The environment
variable DISTRAIN_TOKEN can hold the token instead, but other processes may be able to read it.
SECURITY.md says what a token does and does not protect.)");
  flag("insecure", "admit ranks from anywhere, without a token");
  add("job-id", kText, "ID", "", "identify the job as ID and refuse ranks of other jobs")
      .by_default("the id from torchrun, mpirun or srun")
      .details(
          R"(Jobs with different ids can start on one host at the same time: the ranks on one host find each
other by the id, and without --master-port the port of rank 0 is derived from it.)");
  add("transport", kChoice, "NAME", "auto",
      "connect ranks by this transport; auto is unix on one host and tcp between hosts")
      .offers({"auto", "tcp", "unix"});
  duration("rpc-timeout", "60", "fail a remote call after TIME: 60, 60s, 50ms, 5m, 2h")
      .above(0, 1e6);
  duration("collective-timeout", "0",
           "fail a collective operation after TIME; 0 waits as long as its ranks live");
  duration("join-timeout", "300", "wait up to TIME for all ranks to join").above(0, 1e6);
  duration("peer-timeout", "5", "treat a rank as lost after TIME of silence").above(0, 1e6);

  group = "Run";
  scope = Scope::kInput;
  add("device", kText, "DEVICE", "cpu",
      "compute on cpu, cuda (each host's GPUs in turn), cuda:N, or per role: ROLE=DEVICE[,...]")
      .offers({"cpu", "cuda"})
      .of_predict()
      .details(
          R"(`cuda` takes the GPU of the local rank if torchrun, mpirun or srun set it, and otherwise the
host's GPUs in turn; ranks may share a GPU. Roles that are not named compute on the CPU. A rank that
joins without --device inherits it from rank 0.)");
  scope = Scope::kJob;
  add("trace", kText, "FILE", "", "write a timeline of all ranks to FILE, for ui.perfetto.dev")
      .of_predict()
      .details("Rank 0 writes the file; see TRACES in the program's own man page.");
  scope = Scope::kRank;
  add("threads", kInteger, "N", "0",
      "use N threads for each operation; 0 divides the CPUs among the host's ranks")
      .range(0, 1024)
      .of_predict()
      .details(
          R"(The CPUs are those of the process's affinity mask, or fewer if a control group limits CPU time. If
several launchers start ranks on this host, the number is known only when all ranks have joined; the
`ready` line reports it.)");
  add("inject", kText, "FAULT[,...]", "",
      "inject faults for tests: delay=50ms@rank=2, fail=checkpoint.3, save=200ms")
      .details(
          R"(`delay` delays each call of the rank, or of every rank without `@rank`; `fail=checkpoint.N` kills
rank 0, or the given server of tables, at the Nth system call of its first save; `save` delays the
writing of each checkpoint.)");
  flag("pretty", "print lines for people on standard output in place of JSON")
      .details(
          "The environment variable DISTRAIN_PRETTY=1 does so if standard output is a terminal.")
      .of_predict();
  add("progress", kChoice, "WHEN", "auto",
      "show progress on standard error: auto, if it is a terminal; plain, as whole lines, wherever "
      "they go; none")
      .offers({"auto", "plain", "none"})
      .details(
          R"(With `auto` a progress bar is drawn if standard output is a file or /dev/null. If standard output is
a pipe, only whole lines are printed, because the pipe's reader may write to the same terminal. If
standard output is a terminal, only warnings are printed. `plain` prints a progress line every 30 s.
A job in the background draws nothing.)")
      .of_predict();
  add("log", kText, "FILE", "", "also append the JSON lines to FILE")
      .details(
          R"(Lines of earlier runs are kept. Several processes of a host may share FILE. If it cannot be opened, the
job is refused; if it cannot be written later, a `warn` line reports that, and the job continues.)")
      .of_predict();
  flag("quiet", "show no progress on standard error; the same as --progress none", 'q')
      .of_predict();
  add("config", kText, "FILE", "", "read options from FILE, a TOML file of lines NAME = VALUE")
      .details(
          R"(The command line wins over FILE; `--NAME=false` resets a flag. Texts are in quotes, lists like [1, 2].
Paths are relative to the working directory. If ranks are started one by one, only rank 0 needs FILE.)");
  scope = Scope::kInfo;
  flag("print-config", "print the value of each option and where it comes from; run nothing")
      .details(
          "With --pretty, print a file for --config; values that the user did not give are "
          "comments.");
  flag("dry-run",
       "check the options and print a line for each rank that would start; start nothing");
  flag("help", "print this summary", 'h').of_predict();
  flag("version", "print the versions of the program, distrain and LibTorch", 'V');
}

/// Returns the first mistake in the options' names, or "". The first `own` options are the job's.
std::string naming_mistake(const OptionTable& table, size_t own) {
  std::set<std::string> names;
  for (size_t i = 0; i < table.size(); ++i) {
    const std::string &name = table[i].name, &old_name = table[i].old_name;
    if (name.find('_') != std::string::npos) {
      return fmt::format("declare --{} with '-': a user may write '_' for it", name);
    }
    if (names.insert(name).second && (old_name.empty() || names.insert(old_name).second)) continue;
    if (i >= own) return fmt::format("every job has an option --{}: rename the job's own", name);
    return "--" + name +
           " is declared twice: change the first one with list.row(), list.find() or "
           "list.without()";
  }
  return {};
}

/// Returns the name of the option in `arg`: "--batch_size=3" → "batch-size".
std::string named_in(const std::string& arg) {
  std::string name = arg.substr(std::min(arg.find_first_not_of('-'), arg.size()));
  name = name.substr(0, name.find('='));
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

[[noreturn]] void refuse(const OptionTable& table, const std::vector<std::string>& extras,
                         const Program* program, bool is_predict) {
  const auto option = std::ranges::find_if(
      extras, [](const std::string& arg) { return arg.size() > 1 && arg[0] == '-'; });
  if (option == extras.end()) {
    invalid("unexpected argument '{}': every option begins with --", extras.front());
  }
  invalid("unknown option {}{}", option->substr(0, option->find('=')),
          hint_of(table, named_in(*option), program, is_predict));
}

/// Returns all spellings of an option, as CLI11 expects them.
std::string spellings(const Option& option) {
  std::string names = "--" + option.name;
  for (std::string name : {option.name, option.old_name}) {
    if (name == option.old_name && !name.empty()) names += ",--" + name;
    if (name.find('-') == std::string::npos) continue;
    std::replace(name.begin(), name.end(), '-', '_');  // as in PyTorch's tutorials
    names += ",--" + name;
  }
  if (option.short_name) names += std::string(",-") + option.short_name;
  return names;
}

/// Throws `invalid` for arguments that CLI11 would misread: without a value, `--name` would take
/// the next option as its value, and `--name=` would take the next argument.
void check_values(const CLI::App& app, const OptionTable& table,
                  const std::vector<std::string>& args, bool has_operand) {
  for (size_t i = 0; i < args.size(); ++i) {
    const size_t equals = args[i].find('=');
    const CLI::Option* const known = app.get_option_no_throw(args[i].substr(0, equals));
    if (!known) continue;
    const Option* const option = find_option(table, known->get_lnames().front());
    const bool has_next = i + 1 < args.size();
    if (option->kind == ValueKind::kFlag) {
      const std::string end = args[i].substr(std::min(equals, args[i].size()));
      const bool is_reset = args[i].starts_with("--") && (end == "=false" || end == "=true");
      if (!end.empty() && !is_reset) invalid("--{} takes no value", option->name);
      if (has_next && !has_operand && !args[i + 1].starts_with('-')) {
        invalid("unexpected argument '{}': --{} takes no value", args[i + 1], option->name);
      }
      continue;
    }
    const bool missing = equals == std::string::npos ? !has_next || args[i + 1].starts_with("--")
                                                     : equals + 1 == args[i].size();
    if (missing) {
      invalid("--{} needs a value: {}", option->name, job::allowed_values(*option));
    }
    if (equals == std::string::npos) ++i;
  }
}

}  // namespace

std::string hint_of(const OptionTable& table, const std::string& name, const Program* program,
                    bool is_predict) {
  std::vector<std::string> names;
  for (const Option& each : table) names.push_back(each.name);
  const auto meant = base::did_you_mean(name, names);
  if (!program) return meant ? fmt::format("; did you mean --{}?", *meant) : "";
  std::string owners, call = program->name + " predict";
  for (const JobCommand& job : program->commands) {
    if (&job.table == &table && !is_predict) call = program->call_of(job);
    if (!find_option(job.table, name) || find_option(table, name)) continue;
    owners += (owners.empty() ? ": it is an option of " : ", ") + job.name;
  }
  if (meant && owners.empty()) return fmt::format("; did you mean --{}?", *meant);
  return fmt::format("{}; see {} --help", owners, call);
}

OptionTable whole_table(job::JobInfo& job) {
  constexpr const char* kFromTheEnd[] = {"Run", "Network", "Ranks", "Checkpoints", "Training"};
  OptionTable table = job.table;
  append_common(table);
  if (job.mistake.empty()) job.mistake = naming_mistake(table, job.table.size());
  std::ranges::stable_sort(table, {}, [&](const Option& option) {
    return std::end(kFromTheEnd) - std::ranges::find(kFromTheEnd, option.group);
  });
  std::erase_if(table, [&, saves = find_option(table, "checkpoint") != nullptr](const auto& each) {
    const bool of_saves = each.name == "max-restarts" || each.name == "save-timeout";
    return (of_saves && !saves) || (each.name == "local" && !job.has_local);
  });
  if (job.change && job.mistake.empty()) job.change(table);
  for (Option& option : table) {
    if (option.is_required) option.help += " (required)";
  }
  return table;
}

ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args,
                            std::vector<std::string>* operands, const Program* program,
                            size_t most_operands) {
  ParsedOptions parsed(table);
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  for (const Option& option : table) {
    if (option.kind == ValueKind::kFlag) {
      const auto set = [&parsed, &option](int64_t count) {
        parsed.set(option.name, count > 0 ? "true" : "false");
      };
      app.add_flag_function(spellings(option), set)
          ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
      continue;
    }
    // If an option is repeated, the last value counts, so that a script can append options. Files
    // add up.
    CLI::Option* const added = app.add_option_function<std::string>(
        spellings(option), [&parsed, &option](const std::string& value) {
          parsed.set(option.name, canonical_value(option, value, "--" + option.name));
        });
    if (option.path == Option::Path::kFiles) {
      added->join(',')->expected(1, 1 << 20);  // a pattern that the shell expands, too
    } else {
      added->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
  check_values(app, table, args, operands != nullptr);
  try {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 expects reverse order
  } catch (const CLI::ParseError& e) {
    invalid(e.what());
  }
  std::vector<std::string> extras = app.remaining();
  std::erase_if(extras, [&](const std::string& word) {
    const bool is_operand =
        operands && operands->size() < most_operands && (word == "-" || !word.starts_with('-'));
    if (is_operand) operands->push_back(word);
    return is_operand;
  });
  if (!extras.empty()) refuse(table, extras, program, operands != nullptr);
  return parsed;
}

}  // namespace distrain::app
