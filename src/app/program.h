#pragma once

#include <fmt/format.h>

#include "distrain/app/main.h"
#include "distrain/job/checkpoints.h"
#include "placement.h"

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
  const JobCommand* find(const std::string& job) const;
  bool has_one_job() const { return commands.size() == 1; }
  /// Returns the words that start the job: only the program's name if the program has one job.
  std::string call_of(const JobCommand& command) const {
    return has_one_job() ? name : name + ' ' + command.name;
  }
};

/// A subcommand that is not a job: it prints a text about the program, or it is `predict`.
struct TextCommand {
  std::string name;
  std::string summary;
  std::string argument;  ///< its name in help, such as SHELL
  std::vector<std::string> choices;
  bool needs_argument = false;
  /// Returns the text; `argument` is empty if none is given. Not set for `predict`.
  std::function<std::string(const Program&, const std::string& argument)> text = {};
  std::string description = {};   ///< shown in help instead of the choices
  job::OptionTable options = {};  ///< of `predict`; empty for other commands
};
/// Returns help, man, completion and schema; predict comes before them if a job supports it.
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

/// Returns all events of the job. `config` of the `start` event has a field for each option.
std::vector<job::Event> events_of(const JobCommand& command);
std::vector<std::string> event_names(const Program& program);
/// Returns the JSON Schema of the program's lines, or of the lines of `event` unless it is empty.
std::string schema(const Program& program, const std::string& event);

/// Parses `args`, runs or starts the ranks of this command line, and returns the exit code.
/// Messages about options refer to `program`, unless it is null.
int run_job_command(const JobCommand& command, const std::vector<std::string>& args,
                    base::TimePoint started, const Program* program = nullptr);
/// Runs `predict` with the job that saved the checkpoint. Returns the exit code.
int run_predict_command(const Program& program, const std::vector<std::string>& args,
                        base::TimePoint started);

/// Reports a failure before any rank ran: prints one line on stderr, and `error` and `end` lines on
/// stdout unless it is a terminal or `args` has --pretty. Returns the exit code.
int report_failure(const std::string& cmd, const base::Error& error, base::TimePoint started,
                   const std::vector<std::string>& args);
/// Prints `text` on stdout and returns the exit code.
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

/// Parses `args`, without the names of program and command. Stores one argument that is not an
/// option in `operand`, unless it is null. Throws `invalid`; the message about an unknown option
/// refers to the help and the other jobs of `program`, unless it is null.
ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args,
                            std::string* operand = nullptr, const Program* program = nullptr);

/// Returns the default as the help and the man page show it; empty if they show none.
inline std::string default_in_words(const Option& option) {
  if (option.kind == ValueKind::kFlag || option.is_required) return {};
  return option.initial_in_words.empty() ? option.initial : option.initial_in_words;
}
/// Sets the options that are not given to their values in the checkpoint of `--resume`, if it
/// exists. Returns a list of differing options in words; throws `bad_data` if one must not differ.
std::string take_resumed_options(ParsedOptions& options, const std::string& cmd);
/// Sets the options that define the model to their values in `saved`. Throws `invalid` if an option
/// is given that `predict` does not use, and `bad_data` if a given value differs.
void take_model_options(ParsedOptions& options, const job::Snapshot& saved);

/// Returns the token from --token-file or, with a warning, from DISTRAIN_TOKEN, which is removed
/// from the environment; empty if neither is set. Throws `auth` if other users may read or change
/// the file, and `invalid` if there is no valid token in it.
std::string take_token(const ParsedOptions& options, Placement& placement);

/// Checks required options, dependencies and paths before any rank starts. Throws `invalid` or
/// `bad_data`; warns about options without effect.
void check_options(const ParsedOptions& options, Placement& placement);

/// Throws `invalid` if `--inject KIND=VALUE[@rank=N][,...]` is malformed or impossible. Warns in
/// `placement` of faults without effect. `has_stages`: ranks from 1 on are pipeline stages.
void check_injections(const ParsedOptions& options, bool has_stages, Placement& placement);
/// Returns the faults for `rank`. If a kind is given twice, the last one applies.
job::Injection injection_of(const ParsedOptions& options, int rank);

}  // namespace distrain::app
