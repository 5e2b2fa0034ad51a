#pragma once

#include <fmt/format.h>

#include "distrain/app/main.h"
#include "distrain/job/checkpoints.h"
#include "placement.h"
#include "process/output.h"

namespace distrain::app {

using base::invalid;
/// Throws an exception of kind `invalid` with a formatted message.
template <class Arg, class... Args>
[[noreturn]] void invalid(fmt::format_string<Arg, Args...> format, Arg&& arg, Args&&... args) {
  base::invalid(fmt::format(format, std::forward<Arg>(arg), std::forward<Args>(args)...));
}

struct Program {
  std::string name;
  const std::vector<JobCommand>& commands;
  About about;

  /// Returns the job with this name, or null if there is no such job.
  const JobCommand* find(const std::string& job) const {
    const auto it = std::ranges::find(commands, job, &JobCommand::name);
    return it == commands.end() ? nullptr : &*it;
  }
  bool has_one_job() const { return commands.size() == 1; }
  /// Returns the words that start the job: "PROGRAM JOB", or "PROGRAM" if there is only one job.
  std::string call_of(const JobCommand& command) const {
    return has_one_job() ? name : name + ' ' + command.name;
  }
};

/// A subcommand that is not a job: it prints a text about the program, or it has a `run` function.
struct TextCommand {
  std::string name;
  std::string summary;
  std::string argument;  ///< the argument's name in the help, such as SHELL
  std::vector<std::string> choices;
  bool needs_argument = false;
  /// Returns the text to print. `argument` is empty if the user gave none. Null if `run` is set.
  std::function<std::string(const Program&, const std::string& argument)> text = {};
  std::string description = {};   ///< shown in help instead of the choices
  job::OptionTable options = {};  ///< the options of `predict` and `report`; others have none
  /// Runs the command and returns its exit code. `args` are the words after the command's name.
  std::function<int(const Program&, const std::vector<std::string>& args, base::TimePoint started)>
      run = {};
};
/// Returns predict, if a job supports it, and then report, help, man, completion and schema.
std::vector<TextCommand> text_commands(const Program& program);
/// Returns the name and the summary of each subcommand, jobs first.
std::vector<std::pair<std::string, std::string>> subcommands(const Program& program);

std::string version_text(const Program& program);

// Return the --help text or the man page (roff) of the whole program or of one command.
std::string help_text(const Program& program);
std::string help_text(const Program& program, const JobCommand& command);
std::string help_text(const Program& program, const TextCommand& command);
std::string man_page(const Program& program);
std::string man_page(const Program& program, const JobCommand& command);
std::string man_page(const Program& program, const TextCommand& command);
std::string completion(const Program& program, const std::string& shell);

/// Returns the job's events (kinds of JSON lines). A `config` in them has a field for each option.
std::vector<job::Event> events_of(const JobCommand& command);
std::vector<std::string> event_names(const Program& program);
/// Returns the JSON Schema of all JSON lines or, if `event` is not empty, of that event's lines.
std::string schema(const Program& program, const std::string& event);

/// Parses `args`, runs or starts the ranks of this command line, and returns the exit code.
/// If `program` is not null, the message about an unknown option names its jobs and its help.
int run_job_command(const JobCommand& command, const std::vector<std::string>& args,
                    base::TimePoint started, const Program* program = nullptr);
/// Runs `predict` with the job that saved the checkpoint. Returns the exit code.
int run_predict_command(const Program& program, const std::vector<std::string>& args,
                        base::TimePoint started);

/// The options of `report`.
job::OptionTable report_options();
/// Writes the HTML page of `report`. Returns the exit code. Throws `invalid`, `bad_data` or
/// `resources`.
int run_report_command(const Program& program, const std::vector<std::string>& args);

/// Reports a failure before any rank ran: prints one line on stderr, and lines `error` and `end` to
/// `log` and, unless that is a terminal or `args` has --pretty, to stdout. Returns the exit code.
int report_failure(const std::string& cmd, const base::Error& error, base::TimePoint started,
                   const std::vector<std::string>& args, LogFile* log = nullptr);
/// Prints `text` on stdout. Returns the exit code: 0, or exit_code_of_write_error().
int print_text(const std::string& text);

using job::Json;
using job::Option;
using job::OptionMap;
using job::OptionTable;
using job::ParsedOptions;
using job::Scope;
using job::ValueKind;

/// Returns the job's own options and the options that all jobs share, sorted by group. Sets
/// `job.mistake` if two options have the same name or a name is not valid.
OptionTable whole_table(job::JobInfo& job);

/// Parses `args`, the words after the names of program and command. If `operands` is not null,
/// accepts up to `most_operands` arguments that are not options, such as predict's FILE, and stores
/// them there. Throws `invalid`. If `program` is given, the message about an unknown option names
/// its jobs and help.
ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args,
                            std::vector<std::string>* operands = nullptr,
                            const Program* program = nullptr, size_t most_operands = 1);

/// Returns the end of the message for an unknown option, as in "; did you mean --lr?".
std::string hint_of(const OptionTable& table, const std::string& name, const Program* program,
                    bool is_predict = false);

/// Sets the options in the file of --config that the command line has not set. Throws `invalid`. In
/// a rank that the launcher started by exec, sets the launcher's options and reads no file.
void read_config(ParsedOptions& options, const Program* program, const OptionMap* of_launcher);
/// Returns the fields of the event `config`. If `inherits`, rank 0 sets the options of the job.
Json config_fields(const ParsedOptions& options, bool inherits);
/// Returns the options as a file for --config: values that the user did not set are comments.
std::string config_file(const ParsedOptions& options, bool inherits);

/// Returns the default as the help and the man page show it; empty if they show none.
inline std::string default_in_words(const Option& option) {
  if (option.kind == ValueKind::kFlag || option.is_required) return {};
  if (!option.initial_in_words.empty()) return option.initial_in_words;
  return option.initial + (option.is_duration && !option.initial.empty() ? "s" : "");
}
/// Sets the options that the user did not give to their values in the checkpoint of `--resume`, if
/// it exists. Returns a warning that lists given options that differ from the checkpoint; empty if
/// none does. Throws `bad_data` if an option differs that a resumed job must not change.
std::string take_resumed_options(ParsedOptions& options, const std::string& cmd);
/// Sets the options that define the model to their values in `saved`. Throws `invalid` if the user
/// gave an option that `predict` does not use, and `bad_data` if a given value is not as saved.
void take_model_options(ParsedOptions& options, const job::Snapshot& saved);

/// Returns the job's token from --token-file or, with a warning, from the variable DISTRAIN_TOKEN;
/// empty if neither is set. Removes the variable from the environment. Throws `auth` if other users
/// may read or change the file, and `invalid` if the file or the variable has no valid token.
std::string take_token(const ParsedOptions& options, Placement& placement);

/// Checks required options, dependencies between options, and paths, before any rank starts.
/// Throws `invalid` or `bad_data`; warns about options without effect.
void check_options(const ParsedOptions& options, Placement& placement);

/// Throws `invalid` if `--inject KIND=VALUE[@rank=N][,...]` is malformed or has a fault that cannot
/// occur. Warns in `placement` of faults without effect.
void check_injections(const ParsedOptions& options, const job::AnyDefinition& job,
                      Placement& placement);
/// Returns the injected faults of `rank`. If a kind of fault is given twice, the last one applies.
job::Injection injection_of(const ParsedOptions& options, int rank);

}  // namespace distrain::app
