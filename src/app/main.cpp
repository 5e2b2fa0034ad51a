#include "distrain/app/main.h"

#include <cctype>
#include <filesystem>

#include <fmt/ranges.h>
#include <unistd.h>

#include "process/output.h"
#include "process/process_setup.h"
#include "program.h"

namespace distrain::app {
namespace {

bool asks(const std::vector<std::string>& args, const char* option, const char* short_option) {
  return std::ranges::count(args, option) + std::ranges::count(args, short_option) > 0;
}

std::string meant(const std::string& word, const std::vector<std::string>& candidates,
                  const std::string& otherwise) {
  const auto nearest = base::did_you_mean(word, candidates);
  return nearest ? fmt::format("; did you mean {}?", *nearest) : otherwise;
}

/// Returns the text that `command` prints. Throws `invalid` if `args` are not valid for it.
std::string text_of(const Program& program, const TextCommand& command,
                    const std::vector<std::string>& args) {
  std::string argument = command.argument;
  std::ranges::transform(argument, argument.begin(), ::tolower);
  if (args.size() > 1) invalid("unexpected argument '{}'", args[1]);
  const std::string all = fmt::format("{}", fmt::join(command.choices, ", "));
  if (args.empty() && command.needs_argument)
    invalid("{} needs a {}: {}", command.name, argument, all);
  if (!args.empty() && std::ranges::count(command.choices, args[0]) == 0) {
    invalid("unknown {} '{}'{}", argument, args[0],
            meant(args[0], command.choices, ": must be one of " + all));
  }
  return command.text(program, args.empty() ? std::string() : args[0]);
}

[[noreturn]] void refuse_word(const Program& program, const std::string& word) {
  const std::string option = word.substr(0, word.find('='));
  for (const JobCommand& job : program.commands) {
    if (!option.starts_with("--") || !job::find_option(job.table, option.substr(2))) continue;
    invalid("{0} must follow the command: {1} {2} {0}", option, program.name, job.name);
  }
  std::vector<std::string> names;
  for (const auto& [each, summary] : subcommands(program)) names.push_back(each);
  invalid("unknown {} '{}'{}", word[0] == '-' ? "option" : "command", word,
          meant(word, names, fmt::format("; see {} --help", program.name)));
}

int run_command(const Program& program, std::vector<std::string> args,
                base::TimePoint started) try {
  for (const JobCommand& job : program.commands) {
    if (job.mistake.empty()) continue;
    throw base::Exception(base::ErrorKind::kInternal, "the job " + job.name + ": " + job.mistake);
  }
  // Treat `--help COMMAND` as `help COMMAND`.
  const bool is_help = !args.empty() && (args[0] == "--help" || args[0] == "-h");
  if (is_help && (args.size() == 1 || !args[1].starts_with('-'))) args[0] = "help";

  const bool has_name = !args.empty() && !args[0].starts_with('-');
  const std::string name = has_name ? args[0] : "";
  const std::vector<std::string> rest(args.begin() + (has_name ? 1 : 0), args.end());
  const auto texts = text_commands(program);
  const auto text = std::ranges::find(texts, name, &TextCommand::name);
  const JobCommand* job = program.find(name);
  if (!has_name && program.has_one_job()) job = &program.commands.front();
  if (has_name && !job && text == texts.end()) refuse_word(program, name);

  const bool takes_help = text != texts.end() && std::ranges::count(text->choices, "help") > 0;
  if (asks(rest, "--help", "-h") || (rest.size() == 1 && rest[0] == "help" && !takes_help)) {
    const auto help = std::ranges::find(texts, "help", &TextCommand::name);
    return print_text(help->text(program, name));
  }
  if (asks(rest, "--version", "-V")) return print_text(version_text(program));
  if (job) return run_job_command(*job, rest, started, &program);
  if (text != texts.end() && text->run) return text->run(program, rest, started);
  if (text != texts.end()) return print_text(text_of(program, *text, rest));
  if (!args.empty()) refuse_word(program, args[0]);
  if (!isatty(STDOUT_FILENO)) invalid("no command given; see {} --help", program.name);
  const int code = print_text(help_text(program));
  return code == 0 ? base::exit_code(base::ErrorKind::kInvalid) : code;
} catch (const base::Exception& e) {
  return report_failure("", e.error(), started, args);
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
  leave_process(code);  // skips the destructors of LibTorch's globals, which only take time
}

}  // namespace distrain::app
