#include "distrain/app/main.h"

#include <algorithm>
#include <cctype>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/app/program.h"
#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "process/output.h"
#include "process/process_setup.h"

namespace distrain::app {
namespace {

using base::invalid;

bool asks_for_help(const std::vector<std::string>& args) {
  return std::any_of(args.begin(), args.end(),
                     [](const std::string& arg) { return arg == "--help" || arg == "-h"; });
}

std::string meant(const std::string& word, const std::vector<std::string>& candidates,
                  const std::string& otherwise) {
  const auto nearest = base::did_you_mean(word, candidates);
  return nearest ? fmt::format("; did you mean {}?", *nearest) : otherwise;
}

/// Throws `invalid` unless `args` are such as the command takes.
std::string text_of(const Program& program, const TextCommand& command,
                    const std::vector<std::string>& args) {
  std::string argument = command.argument;
  std::ranges::transform(argument, argument.begin(), ::tolower);
  if (args.size() > 1) invalid(fmt::format("unexpected argument '{}'", args[1]));
  const auto& choices = command.choices;
  if (args.empty() && command.needs_argument) {
    invalid(fmt::format("{} needs a {}: {}", command.name, argument, fmt::join(choices, ", ")));
  }
  if (!args.empty() && std::ranges::find(choices, args[0]) == choices.end()) {
    invalid(fmt::format("unknown {} '{}'{}", argument, args[0], meant(args[0], choices, "")));
  }
  return command.text(program, args.empty() ? std::string() : args[0]);
}

int run_command(const Program& program, const std::vector<std::string>& args,
                base::TimePoint started) try {
  const auto run_job = [&](const JobCommand& job, const std::vector<std::string>& of_job) {
    if (asks_for_help(of_job)) return print_text(help_text(program, job));
    return run_job_command(job, of_job, started);
  };
  const bool has_one_job = program.commands.size() == 1;
  if (has_one_job && (args.empty() || (args[0].starts_with('-') && args[0] != "--version"))) {
    return run_job(program.commands.front(), args);
  }
  if (args.empty()) invalid(fmt::format("no command given; see {} --help", program.name));

  const std::string& name = args[0];
  const std::vector<std::string> rest(args.begin() + 1, args.end());
  if (name == "--version") return print_text(version_text());
  if (name == "--help" || name == "-h") return print_text(help_text(program));
  if (const JobCommand* job = program.find(name)) return run_job(*job, rest);
  for (const TextCommand& command : text_commands(program)) {
    if (command.name != name) continue;
    if (asks_for_help(rest)) return print_text(help_text(program, command));
    if (!command.text) return run_predict_command(program, rest, started);
    return print_text(text_of(program, command, rest));
  }
  std::vector<std::string> names;
  for (const auto& [each, summary] : subcommands(program)) names.push_back(each);
  invalid(fmt::format("unknown {} '{}'{}", name[0] == '-' ? "option" : "command", name,
                      meant(name, names, fmt::format("; see {} --help", program.name))));
} catch (const base::Exception& e) {
  return report_failure("", e.error(), started);
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
  leave_process(code);  // destroying what LibTorch set up takes time and serves nobody
}

}  // namespace distrain::app
