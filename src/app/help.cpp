#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include "distrain/app/program.h"
#include "options.h"

namespace distrain::app {
namespace {

constexpr size_t kHelpColumn = 26;
constexpr size_t kWidth = 90;

constexpr const char* kOfPredict =
    R"(CHECKPOINT is one that a job has saved, or a folder of them, whose newest counts. Examples
come from FILE or standard input; the job's own page says what they are. Options are the
job's: those that the checkpoint keeps have to be as they were, and one that a resumed job may
change, as --lr, is refused.
)";

/// `text` in lines of at most kWidth, the first one starting at column `used`.
std::string wrapped(const std::string& text, size_t used) {
  const std::string new_line = '\n' + std::string(kHelpColumn, ' ');
  std::string out = used + 2 > kHelpColumn ? new_line : std::string(kHelpColumn - used, ' ');
  size_t column = kHelpColumn;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ' ');) {
    if (column > kHelpColumn && column + 1 + word.size() > kWidth) {
      out += new_line;
      column = kHelpColumn;
    } else if (column > kHelpColumn) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out + '\n';
}

std::string option_line(const Option& option) {
  std::string left = option.short_name ? fmt::format("  -{}, --{}", option.short_name, option.name)
                                       : fmt::format("      --{}", option.name);
  const bool is_choice = option.kind == ValueKind::kChoice;
  const std::string value =
      is_choice ? fmt::format("{}", fmt::join(option.choices, "|")) : option.value_name;
  if (!value.empty()) left += ' ' + value;
  const std::string shown = default_in_words(option);
  return left + wrapped(option.help + (shown.empty() ? "" : " [" + shown + "]"), left.size());
}

/// "a, b or c".
std::string listed(const std::vector<std::string>& words) {
  std::string out = fmt::format("{}", fmt::join(words, ", "));
  if (const size_t last = out.rfind(", "); last != std::string::npos) out.replace(last, 2, " or ");
  return out;
}

std::string examples_text(const std::vector<job::Example>& examples) {
  if (examples.empty()) return {};
  std::string out = "\nExamples:\n";
  for (const job::Example& example : examples) out += fmt::format("  {}\n", example.command);
  return out;
}

}  // namespace

std::string version_text() {
  return fmt::format("distrain {} (LibTorch {})\nCUDA: {}\n", DISTRAIN_VERSION, TORCH_VERSION,
                     DISTRAIN_HAS_CUDA ? "compiled, never run on a GPU by us" : "not compiled");
}

std::string help_text(const Program& program) {
  std::string out = program.name;
  if (!program.about.summary.empty()) out += " - " + program.about.summary;
  out += fmt::format("\n\nUsage: {} COMMAND [OPTION]...\n\nCommands:\n", program.name);
  for (const auto& [name, summary] : subcommands(program)) {
    out += fmt::format("  {:<11} {}\n", name, summary);
  }
  return out + R"(
Options:
  -h, --help     this text
      --version  the version of distrain and of LibTorch

Without --rank a command starts every rank of the job here and supervises them; with it, or
under torchrun, mpirun or srun, the process is one rank. stdout is one JSON object a line.
)" + examples_text(program.about.examples);
}

std::string help_text(const Program& program, const JobCommand& command) {
  std::string out = fmt::format("{0} - {1}\n\nUsage: {0} [OPTION]...\n", program.call_of(command),
                                command.summary);
  if (program.commands.size() == 1) {  // this is all the help there is
    std::vector<std::string> others;
    for (const TextCommand& other : text_commands(program)) others.push_back(other.name);
    out += fmt::format("       {} {}\n", program.name, fmt::join(others, "|"));
  }
  if (!command.description.empty()) out += '\n' + command.description + '\n';
  std::string group;
  for (const Option& option : command.table) {
    if (option.hidden) continue;
    if (option.group != group) {
      group = option.group;
      out += fmt::format("\n{}:\n", group);
    }
    out += option_line(option);
  }
  return out + examples_text(command.examples);
}

std::string help_text(const Program& program, const TextCommand& command) {
  const std::string argument =
      command.needs_argument ? command.argument : '[' + command.argument + ']';
  std::string out = fmt::format("{0} {1} - {2}\n\nUsage: {0} {1} {3}\n\n", program.name,
                                command.name, command.summary, argument);
  if (!command.description.empty()) return out + command.description;
  const std::string left = "  " + command.argument;
  return out + left + wrapped(listed(command.choices), left.size());
}

const JobCommand* Program::find(const std::string& job) const {
  const auto it = std::ranges::find(commands, job, &JobCommand::name);
  return it == commands.end() ? nullptr : &*it;
}

std::vector<TextCommand> text_commands(const Program& program) {
  std::vector<std::string> jobs;
  for (const JobCommand& command : program.commands) jobs.push_back(command.name);
  const auto help = [](const Program& of, const std::string& name) {
    const JobCommand* job = of.find(name);
    return job ? help_text(of, *job) : help_text(of);
  };
  const auto man = [](const Program& of, const std::string& name) {
    const JobCommand* job = of.find(name);
    return job ? man_page(of, *job) : man_page(of);
  };
  const std::vector<std::string> shells = {"bash", "zsh", "fish"};
  std::vector<TextCommand> commands = {
      {"predict",
       "what a trained model makes of examples, a line each",
       "CHECKPOINT [FILE] [OPTION]...",
       {},
       true,
       {},
       kOfPredict},
      {"help", "how to use a command", "COMMAND", jobs, false, help},
      {"man", "the man page of a command, or of all", "COMMAND", jobs, false, man},
      {"completion", "a script that completes command lines", "SHELL", shells, true, completion},
      {"schema", "the JSON Schema of the lines that jobs print", "EVENT", event_names(program),
       false, schema},
  };
  if (std::ranges::none_of(program.commands, &JobCommand::has_predict)) {
    commands.erase(commands.begin());
  }
  return commands;
}

std::vector<std::pair<std::string, std::string>> subcommands(const Program& program) {
  std::vector<std::pair<std::string, std::string>> lines;
  for (const JobCommand& job : program.commands) lines.emplace_back(job.name, job.summary);
  for (const TextCommand& text : text_commands(program)) {
    lines.emplace_back(text.name, text.summary);
  }
  return lines;
}

}  // namespace distrain::app
