#include <algorithm>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "options.h"

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
  const auto flag = [&](const char* name, const char* help) {
    return add(name, kFlag, "", "false", help);
  };
  const auto seconds = [&](const char* name, const char* initial, const char* help) {
    add(name, kReal, "S", initial, help).above(0, 1e6);
  };
  flag("local", "the whole job in this process, without RPC: the reference")
      .details("The same model, the same batches, the same lines.");
  add("rank", kInteger, "N|auto", "", "be this one rank of a job whose others start elsewhere")
      .range(0, 1023)
      .offers({"auto"})
      .by_default("from the environment, if it names one")
      .details(
          R"(`auto`: whichever rank nobody else is. Rank 0 says which, before the others are there, or when one
of them is lost and the job goes on without it; until then the process waits, for as long as the
join timeout.)");
  add("ranks", kText, "LIST", "",
      "start these ranks here (0-3 or 0,2-3), the others start elsewhere");
  flag("spawn", "start every rank here, even when the environment names a rank");
  add("world-size", kInteger, "N", "", "number of ranks; the size of the job follows")
      .range(1, 1024)
      .by_default("follows from the options, or from rank 0")
      .details(
          "The option that sets the number of ranks follows from it, and the other way round.");
  add("master-addr", kText, "HOST", "localhost", "host of rank 0");
  add("master-port", kInteger, "N", "", "port of rank 0")
      .range(1, 65535)
      .by_default(
          "any free port when spawning; when joining 29500, or what follows from the job's id");

  group = "Checkpoints";
  add("max-restarts", kInteger, "N", "0", "start the ranks again so often when one is lost")
      .range(0, 1'000'000)
      .needs("checkpoint")
      .details(
          R"(Needs --checkpoint, where rank 0 is. After a rank was killed or lost, or was short of memory, say, all
ranks are started again, and go on from the newest checkpoint; a trainer that the job goes on without
is started again by itself. Each launcher of a job on several
machines starts its own: give it to all of them.)");
  add("save-timeout", kInteger, "N", "60",
      "after a signal, end the ranks once a save makes no progress for N seconds")
      .range(1, 1'000'000)
      .needs("checkpoint")
      .details("By the launcher with rank 0. A step that is under way has as long to end before.");

  group = "Network";
  scope = Scope::kRank;
  add("listen", kText, "ADDR", "", "address to listen on")
      .by_default("the interface that reaches rank 0")
      .details(
          R"(Rank 0 listens on the address that --master-addr names, which must be one of its own host. If others
reach it by another one, of a container's host say, `--listen 0.0.0.0` lets it listen on all.)");
  add("port-range", kText, "A-B", "", "ports to listen on")
      .by_default("any free ones")
      .details("Of rank 0 only where all ranks start here: others have to know its port.");
  add("token-file", kText, "FILE", "",
      "what the job's ranks know and nobody else: a file of mode 0600, the same on each host")
      .by_default("ranks of this user on this host are let in")
      .details(
          R"(Ranks of several hosts, or of several users, need one: each proves to the others that it knows
it. `(umask 077; head -c 32 /dev/urandom | base64 > job.token)` makes one. DISTRAIN_TOKEN holds a
token, too, where others may be able to read it. See SECURITY.md for what it does and does not
protect.)");
  flag("insecure", "let ranks in from anywhere, without a token");
  add("job-id", kText, "ID", "", "what this job is called: ranks of another one are refused")
      .by_default("what torchrun, mpirun or srun calls it")
      .details(
          R"(Two jobs with different ids on one host neither meet nor wait for each other: the id decides where
ranks of one host meet and, without --master-port, which port rank 0 listens on.)");
  add("transport", kChoice, "NAME", "auto",
      "between ranks; auto: a unix socket on one host, TCP between hosts")
      .offers({"auto", "tcp", "unix"});
  seconds("rpc-timeout", "60", "deadline of one remote call, in seconds");
  add("collective-timeout", kReal, "S", "0",
      "deadline of one collective operation, in seconds; 0: as long as its ranks live")
      .range(0, 1e6);
  seconds("join-timeout", "300", "how long to wait for all ranks, in seconds");
  seconds("peer-timeout", "5", "seconds of silence after which a rank counts as lost");

  group = "Run";
  scope = Scope::kInput;
  add("device", kText, "DEVICE", "cpu",
      "where ranks compute: cpu, cuda (each host's GPUs in turn), cuda:N, or ROLE=DEVICE[,...], "
      "the other roles on the CPU")
      .offers({"cpu", "cuda"})
      .of_predict()
      .details(
          R"(`cuda` is the GPU of the local rank where torchrun, mpirun or srun says which that is, else
the GPUs in turn; ranks may share one. A rank that joins may name its own, otherwise what rank 0
was given holds.)");
  scope = Scope::kJob;
  add("trace", kText, "FILE", "", "write what all ranks did here, for ui.perfetto.dev")
      .of_predict()
      .details("On rank 0's machine; see TRACES in the program's own page.");
  scope = Scope::kRank;
  add("threads", kInteger, "N", "0", "threads of one operation")
      .range(0, 1024)
      .by_default("CPUs / ranks that share them")
      .of_predict()
      .details(
          R"(CPUs are those of the process's affinity mask, fewer if a control group limits their time. Where
other launchers start ranks on this host, too, the number is known once all ranks have met: `ready`
tells it.)");
  add("inject", kText, "FAULT[,...]", "",
      "try a fault: delay=50ms@rank=2 (before each call of that rank; us, ms or s), "
      "fail=checkpoint.3 (die at the 3rd system call of the first save), save=200ms (before each "
      "checkpoint is written)")
      .details(
          R"(Without `@rank` every rank is delayed. Of `fail=checkpoint.N` rank 0 dies, at the Nth system
call of its first save.)");
  flag("quiet", "no progress display");
  table.back().short_name = 'q';
  scope = Scope::kInfo;
  flag("help", "a summary of the options").of_predict();
  table.back().short_name = 'h';
  flag("version", "the versions of the program, of distrain and of LibTorch");
  table.back().short_name = 'V';
  flag("dump-placement", "which ranks would run where, as JSON");
  table.back().hidden = true;
}

/// Returns the first mistake in the names of options; empty if there is none. The first `own`
/// options are the job's own.
std::string naming_mistake(const OptionTable& table, size_t own) {
  std::set<std::string> names;
  for (size_t i = 0; i < table.size(); ++i) {
    const auto& [name, old_name] = std::tie(table[i].name, table[i].old_name);
    if (name.find('_') != std::string::npos) {
      return fmt::format("declare --{} with '-': a user may write '_' for it", name);
    }
    if (names.insert(name).second && (old_name.empty() || names.insert(old_name).second)) continue;
    if (i >= own) return fmt::format("every job has an option --{}: rename the job's own", name);
    return fmt::format(
        "--{} is declared twice: change the first one with list.row(), list.find() or "
        "list.without()",
        name);
  }
  return {};
}

}  // namespace

OptionTable whole_table(job::JobInfo& job) {
  static constexpr std::string_view kFromTheEnd[] = {"Run", "Network", "Ranks", "Checkpoints",
                                                     "Training"};
  OptionTable table = job.table;
  append_common(table);
  if (job.mistake.empty()) job.mistake = naming_mistake(table, job.table.size());
  std::ranges::stable_sort(table, {}, [](const Option& option) {
    return std::end(kFromTheEnd) - std::ranges::find(kFromTheEnd, option.group);
  });
  if (!find_option(table, "checkpoint")) {
    std::erase_if(table, [](const Option& each) {
      return each.name == "max-restarts" || each.name == "save-timeout";
    });
  }
  if (!job.has_local) std::erase_if(table, [](const Option& each) { return each.name == "local"; });
  if (job.change && job.mistake.empty()) job.change(table);
  for (Option& option : table) {
    if (option.is_required) option.help += " (required)";
  }
  return table;
}

}  // namespace distrain::app
