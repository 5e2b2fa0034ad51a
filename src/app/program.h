#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "distrain/app/main.h"
#include "distrain/base/clock.h"
#include "distrain/base/error.h"

namespace distrain::app {

using base::invalid;
/// Throws an exception of kind `invalid` with a formatted message.
template <class Arg, class... Args>
[[noreturn]] void invalid(fmt::format_string<Arg, Args...> format, Arg&& arg, Args&&... args) {
  base::invalid(fmt::format(format, std::forward<Arg>(arg), std::forward<Args>(args)...));
}

/// A program's name, jobs and description.
struct Program {
  std::string name;
  const std::vector<JobCommand>& commands;
  About about;

  /// Returns null if there is no such job.
  const JobCommand* find(const std::string& job) const;
  bool has_one_job() const { return commands.size() == 1; }
  /// Returns the words that call the job: the program's name alone if it has only one job.
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

// Return the --help, or the man page as roff, of the program, a job or another command. Those of a
// program with one job include that job's.
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

/// Parses `args` and runs the ranks that belong in this process or under it. Returns the exit code.
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

}  // namespace distrain::app
