#include <algorithm>
#include <cctype>
#include <regex>
#include <sstream>

#include <c10/util/StringUtil.h>
#include <fmt/ranges.h>

#include "program.h"

namespace distrain::app {
namespace {

// Format of texts: empty lines separate paragraphs; lines that begin with four spaces are verbatim;
// "* term: " begins a list item. Words in backticks and options become bold, and PROGRAM becomes
// the program's name.

/// The end of the section DESCRIPTION on the program's page.
constexpr const char* kProgramDescription = R"(
A command starts every rank of its job on this machine and supervises the ranks. With --rank, or if
torchrun, mpirun or srun set a rank in the environment, the process is that one rank.
)";

/// The end of the section DESCRIPTION on each job's page.
constexpr const char* kJobDescription = R"(
Without --rank the command starts every rank here. With --rank it is one rank, and on one machine no
other option is needed: the options of rank 0 apply to the whole job, and the other ranks inherit them.
If an option is also given to another rank, it must have the same value.

Options may be written `--option=value` or `--option value`, and with `_` instead of `-` inside their
names. If an option is given twice, the last value counts.
)";

/// The beginning of the section OUTPUT on the program's page, before the list of events.
constexpr const char* kOutput = R"(
Standard output is JSON lines and nothing else: one object per line, from all ranks.

    {"v":1,"ts":1795239262.9,"run":"5d0f3a1c9be27e44","event":"step","cmd":"ps",
     "rank":1,"role":"trainer1","epoch":1,"step":20,...}

Numbers are finite or null. Each line has `v`, the version of the format; `ts`, the time in seconds
since 1970; `run`, the id of the run (null until the ranks have met); `event`; `cmd`, the subcommand;
and the `rank` and `role` of the process that printed the line. The launcher has a null `rank` and the
`role` launcher. Both are null until rank 0 has assigned the rank.

`PROGRAM schema` prints the JSON Schema of all lines. All jobs print these events:
)";

/// The end of the section OUTPUT on the program's page, after the list of events.
constexpr const char* kOutputEnd = R"(
Standard error shows the progress if it is a terminal and standard output is a file or /dev/null. If a
job fails, standard error has one line.
)";

/// The sections of the program's page after OUTPUT.
constexpr struct {
  const char* title;
  const char* text;
} kSections[] = {
    {"DEVICES", R"(
--device puts the computation on GPUs (tested on one GPU, never on two). Without --device all
ranks compute on the CPU, and no CUDA library is loaded. Initial values, batches and dropout do not
depend on the device. Neither do checkpoints, so a job may resume on another device.

If a GPU, its driver, LibTorch's CUDA library or libdistrain_cuda.so is missing, the job ends with exit
status 9 and a message that says what is missing. The `start` line has the device of a rank, or the
`ready` line if rank 0 chooses the device.
)"},
    {"CHECKPOINTS", R"(
With `--checkpoint DIR` rank 0 writes each checkpoint to a new folder in DIR:

    DIR/step-000000000020/model.safetensors
    DIR/step-000000000020/optimizer.safetensors
    DIR/step-000000000020/manifest.json

Parameters have the names that PyTorch's modules give them, and any safetensors reader can open the
files. The manifest has the sizes and checksums of the files, the counters, the position in the data and
the state of the random numbers. A folder appears complete or not at all, even if the process is killed.
The newest two checkpoints are kept, or the number that --keep gives.

--resume continues from a checkpoint. With the same options and `--mode sync` or --local, a resumed job
ends on the CPU with exactly the parameters of an uninterrupted one. A checkpoint that is damaged or
belongs to another job is refused with exit status 7.

Training continues while the files are written. Rows of tables and optimizer states, which change in
place, are copied first. The next save and the end of the job wait for the save in progress.

With `--max-restarts N` the launcher restarts all its ranks, at most N times, if one of them is killed,
is lost, or runs out of memory or another resource. It does not restart them after a crash of the
program (SIGSEGV, SIGABRT), wrong usage, bad data, a wrong token or a loss that is not finite. The ranks
resume from the newest checkpoint, and a `restart` line replaces the `error` line. The launcher first
waits a quarter of a second, and twice as long after each restart without progress, up to half a minute.
On several machines each launcher restarts its own ranks, which join rank 0 again. The job waits for a
machine that does not come back until --join-timeout.

If trainers share all parameters and do not wait for each other in each step (`ps` with `--mode async`
or `ssp`), the job continues without a trainer that is killed, is lost or runs out of memory, as long as
--min-trainers are left. A `lost` line names the trainer and the steps that it had completed. Steps that
it had begun go to the others. A process that is started with the same --rank, or with `--rank auto`,
replaces the lost trainer at any time before the job ends, and a `returned` line reports it. If the lost
process had only been stopped, it ends with exit status 5 when it continues. With `--max-restarts N` the
launcher restarts only that trainer. In such a job without --checkpoint, a signal to a trainer counts as
the loss of that trainer.

On SIGINT (Ctrl-C), SIGTERM or SIGHUP a job with --checkpoint finishes its step, saves and ends. The
launcher kills the ranks if the save makes no progress for --save-timeout. A second signal, at
least 2 s after the first, ends the job at once. An earlier one counts as the first, because terminals,
timeout(1) and service managers signal both a process and its group. The job also saves and ends if it
cannot write to standard output, because the reader is gone or the disk is full. A job without
--checkpoint ends at once. SIGHUP is ignored under nohup(1).
)"},
    {"SIGNALS", R"(
SIGINT, SIGTERM and SIGHUP end a job; see CHECKPOINTS. On SIGUSR1 a job with --checkpoint saves and
continues. On SIGQUIT (Ctrl-\) each rank prints to standard error the calls, collectives, updates and
ranks that it waits for, the longest wait first, and the job continues. The launcher passes these
signals on to its ranks.

Ctrl-Z (SIGTSTP) stops the launcher and its ranks until SIGCONT. Deadlines of their calls keep running
(--rpc-timeout), and ranks on other machines count them as lost after --peer-timeout.
)"},
    {"TRACES", R"(
With `--trace FILE` each rank records the work of its threads, the calls that it makes and answers, and
its collectives. At the end of the job rank 0 collects the records, aligns their clocks and writes FILE
in the Trace Event Format, one event per line. Open FILE with ui.perfetto.dev or chrome://tracing. Each
rank appears as a process, and an arrow leads from each call to the function that it runs on another
rank. A trace has at most four million events, divided among the ranks, and at most one million per
rank; if there are more, a `warn` line has the number of missing events.

FILE appears complete at the end of the job and replaces an older file. If FILE is a symbolic link, the
trace is written to its target. Before any rank starts, the program checks that FILE can be written.
Times of different machines are off by up to about half of a message's round trip, but no event begins
before its cause.

If the job fails after it has begun, or if the records of a rank cannot be collected, FILE has only the
records of rank 0, and the exit status reports the failure. If a signal ends the job before it can save,
no file is written. The calls that collect a trace are not counted in `end`; the few that compare the
clocks at the start are.
)"},
    {"EXIT STATUS", R"(
* 0: success
* 1: internal error
* 2: wrong usage
* 3: the ranks could not meet: port in use, join timeout, rank taken, wrong world size, different
options, another job or generation
* 4: wrong token, version or protocol
* 5: a peer was lost
* 6: a function that ran on another rank failed
* 7: bad data or a bad checkpoint
* 8: the loss is not finite; nothing is saved then
* 9: no resources: memory, file descriptors, disk; standard output full or closed
* 10: a call exceeded its deadline
* 11: the job ended without reaching its goal
* 128+n: ended by signal n: 137 if a rank was killed with SIGKILL, 143 after SIGTERM, 129 after SIGHUP,
130 after SIGINT (by that signal itself, so that a shell loop ends, too), 141 if the reader of standard
output is gone

The launcher exits with the status of the rank that failed first.
)"},
    {"ENVIRONMENT", R"(
If no option sets them, the rank, the number of ranks and the address come from the first of these
groups that is set:

* RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun and Kubernetes; the address is also used with the
other launchers; a MASTER_PORT like tcp://10.0.0.1:29500, which Kubernetes sets for a service called
master, is ignored
* OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE: Open MPI
* PMI_RANK, PMI_SIZE: MPICH's Hydra and others
* SLURM_PROCID, SLURM_NTASKS: Slurm, only inside a step (SLURM_STEP_ID)
* JOB_COMPLETION_INDEX, WORLD_SIZE: an Indexed Job of Kubernetes, only with --master-addr or MASTER_ADDR

With `--device cuda`, a process that is one rank takes its GPU from LOCAL_RANK,
OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID or SLURM_LOCALID. Other variables:

* TORCHELASTIC_USE_AGENT_STORE: if it is True, torchrun itself listens on MASTER_PORT, and the ranks
derive another port from it
* LOCAL_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS, SLURM_STEP_NUM_NODES: tell whether all
ranks are on this host; if so, no rank listens on TCP unless an option asks for it
* OMP_NUM_THREADS: threads per operation, unless --threads is given
* DISTRAIN_TOKEN: token of the job, unless --token-file is given; other processes may be able to read it
* TORCHELASTIC_RUN_ID, PMIX_NAMESPACE, SLURM_JOB_ID and SLURM_STEP_ID: id of the job, unless --job-id is
given
* TORCHELASTIC_RESTART_COUNT (if all ranks are on one host), SLURM_RESTART_COUNT: number of restarts of
the job; ranks of another restart are refused
* NO_COLOR: no colours in the progress
)"},
    {"FILES", R"(
* libdistrain_cuda.so: loaded by --device cuda from the folder of the program
)"},
};

// Stand for the start and the end of bold text until escaped() replaces them with roff.
constexpr char kBold[] = "\1", kRoman[] = "\2";

std::string escaped(std::string text) {
  const std::pair<const char*, const char*> special[] = {
      {"\\", "\\e"}, {"-", "\\-"}, {kBold, "\\fB"}, {kRoman, "\\fR"}};
  for (const auto& [from, to] : special) c10::ReplaceAll(text, from, to);
  return text;
}

std::string bold(const std::string& text) { return escaped(kBold + text + kRoman); }
std::string italic(const std::string& text) { return "\\fI" + escaped(text) + "\\fR"; }

/// Converts one line of text to roff.
std::string line_of(const std::string& text) {
  static const std::regex kWords("`([^`]*)`|(^|[^[:alnum:]-])(--[[:alnum:]][[:alnum:]-]*)");
  const bool request = text.starts_with('.') || text.starts_with('\'');
  return (request ? "\\&" : "") + escaped(std::regex_replace(text, kWords, "$2\1$1$3\2")) + '\n';
}

/// Converts a text to roff. If `first`, the text follows a heading, which begins its paragraph.
std::string paragraphs(const std::string& text, bool first = true) {
  enum class State { kBreak, kText, kTerms, kVerbatim } state = State::kBreak;
  std::string out;
  const auto enter = [&](State next, const char* how) {
    if (state == State::kVerbatim && next != state) out += ".fi\n.RE\n";
    if (next != state && *how != 0) out += how;
    state = next;
  };
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) {
      enter(State::kBreak, "");
    } else if (line.starts_with("    ")) {
      enter(State::kVerbatim, ".PP\n.RS 4\n.nf\n");
      out += (line[4] == '.' ? "\\&" : "") + escaped(line.substr(4)) + '\n';
    } else if (line.starts_with("* ")) {
      enter(State::kTerms, "");
      const size_t colon = line.find(": ");
      out += ".TP\n" + bold(line.substr(2, colon - 2)) + '\n' + line_of(line.substr(colon + 2));
    } else {
      if (state != State::kTerms) enter(State::kText, first ? "" : ".PP\n");
      out += line_of(line);
    }
    first = first && out.empty();
  }
  enter(State::kBreak, "");
  return out;
}

/// Replaces PROGRAM by the program's name and converts the text to roff.
std::string paragraphs_of(const Program& program, std::string text) {
  c10::ReplaceAll(text, "PROGRAM", program.name);
  return paragraphs(text);
}

std::string title(const Program& program, const std::string& page, const std::string& summary) {
  std::string upper = page;
  std::ranges::transform(upper, upper.begin(), ::toupper);
  const std::string& own = program.about.version;
  return fmt::format(
      ".TH {} 1 \"\" \"{}\" \"User Commands\"\n.SH NAME\n{}{}{}\n.SH SYNOPSIS\n", upper,
      own.empty() ? fmt::format("distrain {}", DISTRAIN_VERSION) : program.name + ' ' + own,
      escaped(page), summary.empty() ? "" : " \\- ", escaped(summary));
}

std::string item(const std::string& term, const std::string& text) {
  return ".TP\n" + term + '\n' + text;
}

std::string reference(const std::string& page) { return "\\fB" + escaped(page) + "\\fR(1)"; }

std::string names_of(const std::vector<job::DeviceRole>& roles) {
  std::string out, idle;
  for (const job::DeviceRole& role : roles) {
    if (role.use == job::DeviceRole::Use::kNone) {
      idle += fmt::format(" Always on the CPU: {}.", role.name);
      continue;
    }
    out += (out.empty() ? "Roles: " : "; ") + role.name;
    if (!role.alias.empty()) out += " or " + role.alias;
    if (role.use == job::DeviceRole::Use::kIfNamed) out += " (on the CPU unless named)";
  }
  return out.empty() ? out : out + ". ROLE may also name a single rank." + idle + '\n';
}

std::string option_item(const Option& option, const std::vector<job::DeviceRole>& roles) {
  std::string term = bold("--" + option.name);
  if (option.short_name) term = bold(std::string("-") + option.short_name) + ", " + term;
  if (option.kind == ValueKind::kChoice) {
    term += ' ' + bold(fmt::format("{}", fmt::join(option.choices, "|")));
  } else if (option.kind != ValueKind::kFlag) {
    term += ' ' + italic(option.value_name);
  }
  const std::string shown = default_in_words(option);
  std::string more = option.details;
  if (!more.empty() && !more.ends_with('\n')) more += '\n';
  if (option.name == "device") more += names_of(roles);
  return item(term, line_of(option.help + (shown.empty() ? "" : " (default: " + shown + ")") +
                            (more.empty() ? "" : ".")) +
                        paragraphs(more));
}

std::string options(const OptionTable& table, const std::vector<job::DeviceRole>& roles = {}) {
  std::string out = ".SH OPTIONS\n", group;
  for (const Option& option : table) {
    if (option.group != group) out += fmt::format(".SS \"{}\"\n", option.group);
    group = option.group;
    out += option_item(option, roles);
  }
  return out;
}

std::string about_job(const JobCommand& command) {
  return command.description + "\n\n" + command.details + '\n' + kJobDescription;
}

std::string synopsis(const std::string& call) {
  return fmt::format("{} [{}]...\n", bold(call), italic("option"));
}

std::string synopsis(const Program& program, const TextCommand& command) {
  std::string argument = italic(command.argument);
  if (!command.needs_argument) argument = '[' + argument + ']';
  return fmt::format("{} {}\n", bold(program.name + ' ' + command.name), argument);
}

std::string fields(const std::vector<job::Field>& all) {
  std::string out;
  for (const job::Field& field : all) {
    out += item(bold(field.name), line_of(field.what));
    if (!field.fields.empty()) out += ".RS\n" + fields(field.fields) + ".RE\n";
  }
  return out;
}

std::string events(const std::vector<job::Event>& all) {
  std::string out;
  for (const job::Event& event : all) {
    if (event.name == "rank_end") {  // do not repeat the fields of `end`
      out += item(bold(event.name), line_of(event.when + ", with the fields of `end`"));
      continue;
    }
    const std::string when = event.when.empty() ? "has these additional fields" : event.when;
    out += item(bold(event.name), line_of(when) + ".RS\n" + fields(event.fields) + ".RE\n");
  }
  return out;
}

/// Returns the section EXAMPLES, each example below its caption; empty if there are none.
std::string examples(const std::vector<job::Example>& all) {
  if (all.empty()) return {};
  std::string text;
  for (const job::Example& example : all) {
    if (!example.what.empty()) text += example.what + ":\n\n";
    text += "    " + example.command + "\n\n";
  }
  return ".SH EXAMPLES\n" + paragraphs(text);
}

}  // namespace

std::string man_page(const Program& program) {
  const JobCommand* only = program.has_one_job() ? &program.commands.front() : nullptr;
  const About& about = program.about;
  std::string out =
      title(program, program.name, only && about.summary.empty() ? only->summary : about.summary);
  out += synopsis(only ? program.name : program.name + " COMMAND");
  std::string commands, pages;
  const auto add = [&](const std::string& name, const std::string& summary, bool has_page) {
    const std::string page = reference(program.name + '-' + name);
    commands += item(bold(name),
                     line_of(summary + (has_page ? "; see" : "")) + (has_page ? page + '\n' : ""));
    if (has_page) pages += page + ",\n";
  };
  for (const JobCommand& command : program.commands) {
    if (!only) add(command.name, command.summary, true);
  }
  for (const TextCommand& command : text_commands(program)) {
    out += ".br\n" + synopsis(program, command);
    add(command.name, command.summary, !command.options.empty());
  }
  out += fmt::format(".br\n{}\n.SH DESCRIPTION\n", bold(program.name + " --version"));
  out += paragraphs(about.description + (only ? "\n\n" + about_job(*only) : kProgramDescription));
  out += ".SH COMMANDS\n" + commands;
  out += only ? options(only->table, only->roles)
              : ".SH OPTIONS\n" +
                    item(bold("-h, --help"), "print a summary of all commands or of one\n") +
                    item(bold("-V, --version"), "print the versions of distrain and LibTorch\n");
  out += ".SH OUTPUT\n" + paragraphs_of(program, kOutput) + events(job::common_events());
  if (only) out += events(only->events);
  out += paragraphs(kOutputEnd, false);
  for (const auto& section : kSections) {
    out += fmt::format(".SH \"{}\"\n", section.title) + paragraphs_of(program, section.text);
  }
  std::vector<job::Example> shown = about.examples;
  if (only) shown.insert(shown.end(), only->examples.begin(), only->examples.end());
  return out + examples(shown) + ".SH \"SEE ALSO\"\n" + pages + reference("jq") + '\n';
}

std::string man_page(const Program& program, const JobCommand& command) {
  if (program.has_one_job()) return man_page(program);
  std::string out = title(program, program.name + '-' + command.name, command.summary);
  out += synopsis(program.call_of(command)) + ".SH DESCRIPTION\n";
  out += paragraphs(about_job(command));
  out += options(command.table, command.roles);
  const std::string main_page = reference(program.name);
  out += ".SH OUTPUT\nStandard output is JSON lines, which are described in\n" + main_page + ".\n";
  if (!command.events.empty()) out += "This command adds:\n" + events(command.events);
  out += ".SH \"EXIT STATUS\"\nSee\n" + main_page + ".\n";
  return out + examples(command.examples) + ".SH \"SEE ALSO\"\n" + main_page + '\n';
}

std::string man_page(const Program& program, const TextCommand& command) {
  std::string out = title(program, program.name + '-' + command.name, command.summary);
  out += synopsis(program, command) + ".SH DESCRIPTION\n";
  out += command.description.empty()
             ? item(italic(command.argument), fmt::format("{}\n", fmt::join(command.choices, ", ")))
             : paragraphs(command.description);
  if (!command.options.empty()) out += options(command.options);
  return out + ".SH \"SEE ALSO\"\n" + reference(program.name) + '\n';
}

}  // namespace distrain::app
