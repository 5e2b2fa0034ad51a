#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "distrain/app/main.h"
#include "distrain/base/clock.h"
#include "distrain/base/error.h"

namespace distrain::app {

/// What a program's own texts are made of.
struct Program {
  std::string name;
  const std::vector<JobCommand>& commands;
  About about;

  /// Null if there is no such job.
  const JobCommand* find(const std::string& job) const;
  bool has_one_job() const { return commands.size() == 1; }
  /// Returns how a user calls the job: the job of a program with one job is the program.
  std::string call_of(const JobCommand& command) const {
    return has_one_job() ? name : name + ' ' + command.name;
  }
};

/// A subcommand that is no job: it prints a text about the program, or it is `predict`.
struct TextCommand {
  std::string name;
  std::string summary;
  std::string argument;  ///< SHELL, …
  std::vector<std::string> choices;
  bool needs_argument = false;
  /// Called with an empty argument if none is given. Empty for `predict`.
  std::function<std::string(const Program&, const std::string& argument)> text = {};
  std::string description = {};   ///< in place of the choices
  job::OptionTable options = {};  ///< those of `predict`
};
/// Returns help, man, completion and schema, and predict if a job has it.
std::vector<TextCommand> text_commands(const Program& program);
/// The name of each subcommand and what it does in a line, jobs first.
std::vector<std::pair<std::string, std::string>> subcommands(const Program& program);

/// Returns the text of --version: the program's own version, then the versions of distrain and
/// LibTorch.
std::string version_text(const Program& program);

/// What --help prints: of the program, of a job (usage, description, options by group with their
/// defaults, examples), of another command. A program with one job has that job's help.
std::string help_text(const Program& program);
std::string help_text(const Program& program, const JobCommand& command);
std::string help_text(const Program& program, const TextCommand& command);

/// The man page of the program, or of a command, as roff. The page of a program with one job is
/// that job's page, too.
std::string man_page(const Program& program);
std::string man_page(const Program& program, const JobCommand& command);
std::string man_page(const Program& program, const TextCommand& command);

/// A completion script for bash, zsh or fish.
std::string completion(const Program& program, const std::string& shell);

/// All that a job prints, `config` of its `start` lines filled in.
std::vector<job::Event> events_of(const JobCommand& command);
/// The names of all jobs' events.
std::vector<std::string> event_names(const Program& program);
/// The JSON Schema of the program's JSON lines, or of those of one event.
std::string schema(const Program& program, const std::string& event);

/// Parses `args`, finds out which ranks run here, and runs them. Gives back the exit code. Messages
/// about options refer to `program`, unless it is null.
int run_job_command(const JobCommand& command, const std::vector<std::string>& args,
                    base::TimePoint started, const Program* program = nullptr);
/// The command `predict`: CHECKPOINT [FILE] [OPTION]..., of whichever of the jobs saved it.
int run_predict_command(const Program& program, const std::vector<std::string>& args,
                        base::TimePoint started);

/// Reports a failure before any rank ran: one line on stderr, and `error` and `end` on stdout
/// unless stdout is for people: a terminal, or with --pretty in `args`. Returns the exit code.
int report_failure(const std::string& cmd, const base::Error& error, base::TimePoint started,
                   const std::vector<std::string>& args);
/// Text that goes to stdout instead of JSON lines. Gives back the exit code.
int print_text(const std::string& text);

}  // namespace distrain::app
