#include "distrain/app/main.h"

#include <algorithm>
#include <cctype>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/app/options.h"
#include "distrain/base/error.h"
#include "process/output.h"
#include "process/process_setup.h"

namespace distrain::app {
namespace {

bool asks_for_help(const std::vector<std::string>& args) {
  return std::any_of(args.begin(), args.end(),
                     [](const std::string& arg) { return arg == "--help" || arg == "-h"; });
}

std::string meant(const std::string& word, const std::vector<std::string>& candidates,
                  const std::string& otherwise) {
  const auto nearest = did_you_mean(word, candidates);
  return nearest ? fmt::format("; did you mean {}?", *nearest) : otherwise;
}

/// Throws `invalid` unless `args` are such as the command takes.
std::string text_of(const TextCommand& command, const std::vector<std::string>& args) {
  const auto refuse = [](const std::string& message) {
    throw base::Exception(base::ErrorKind::kInvalid, message);
  };
  std::string argument = command.argument;
  std::transform(argument.begin(), argument.end(), argument.begin(), ::tolower);
  if (args.size() > 1) refuse(fmt::format("unexpected argument '{}'", args[1]));
  if (args.empty() && command.needs_argument) {
    refuse(fmt::format("{} needs a {}: {}", command.line.name, argument,
                       fmt::join(command.choices, ", ")));
  }
  const auto& choices = command.choices;
  if (!args.empty() && std::find(choices.begin(), choices.end(), args[0]) == choices.end()) {
    refuse(fmt::format("unknown {} '{}'{}", argument, args[0], meant(args[0], choices, "")));
  }
  return command.text(args.empty() ? std::string() : args[0]);
}

int run_command(const Program& program, const std::vector<std::string>& args,
                base::TimePoint started) {
  const auto refuse = [started](const std::string& message) {
    return report_failure("", base::Error{base::ErrorKind::kInvalid, message, -1, {}}, started);
  };
  const bool has_one_job = program.commands.size() == 1;
  if (has_one_job && (args.empty() || (args[0].starts_with('-') && args[0] != "--version"))) {
    const JobCommand& job = program.commands.front();
    if (asks_for_help(args)) return print_text(help_text(program, job));
    return run_job_command(job, args, started);
  }
  if (args.empty()) return refuse(fmt::format("no command given; see {} --help", program.name));

  const std::string& name = args[0];
  const std::vector<std::string> rest(args.begin() + 1, args.end());
  if (name == "--version") return print_text(version_text());
  if (name == "--help" || name == "-h") return print_text(help_text(program));
  std::vector<std::string> names;
  for (const JobCommand& command : program.commands) {
    names.push_back(command.line.name);
    if (command.line.name != name) continue;
    if (asks_for_help(rest)) return print_text(help_text(program, command));
    return run_job_command(command, rest, started);
  }
  for (const TextCommand& command : text_commands(program)) {
    names.push_back(command.line.name);
    if (command.line.name != name) continue;
    if (asks_for_help(rest)) return print_text(help_text(program, command));
    if (!command.text) return run_predict_command(program.commands, rest, started);
    try {
      return print_text(text_of(command, rest));
    } catch (const base::Exception& e) {
      return refuse(e.error().message);
    }
  }
  return refuse(fmt::format("unknown {} '{}'{}", name[0] == '-' ? "option" : "command", name,
                            meant(name, names, fmt::format("; see {} --help", program.name))));
}

}  // namespace

int main(int argc, char** argv, const std::vector<JobCommand>& commands, const About& about) {
  const auto started = process_start();
  const bool stdout_open = secure_standard_fds();
  set_up_process();
  if (!stdout_open) {
    say("stdout is closed");
    return 9;
  }
  const Program program{std::filesystem::path(argv[0]).filename(), commands, about};
  const int code = run_command(program, {argv + 1, argv + argc}, started);
  // Destroying what LibTorch set up takes time and serves nobody.
  leave_process(code);
}

}  // namespace distrain::app
