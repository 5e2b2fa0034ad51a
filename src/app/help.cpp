#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/app/program.h"
#include "process/process_setup.h"

namespace distrain::app {
namespace {

constexpr size_t kHelpColumn = 26;
constexpr size_t kWidth = 90;

/// `text` in lines of at most kWidth, the first one starting at column `used`.
std::string wrapped(const std::string& text, size_t used) {
  std::string out;
  const auto new_line = [&out] { out.append(1, '\n').append(kHelpColumn, ' '); };
  size_t column = kHelpColumn;
  if (used + 2 > kHelpColumn) {
    new_line();
  } else {
    out.append(kHelpColumn - used, ' ');
  }
  for (size_t at = 0; at < text.size();) {
    size_t end = text.find(' ', at);
    if (end == std::string::npos) end = text.size();
    const size_t length = end - at;
    if (column > kHelpColumn && column + 1 + length > kWidth) {
      new_line();
      column = kHelpColumn;
    } else if (column > kHelpColumn) {
      out += ' ';
      ++column;
    }
    out += text.substr(at, length);
    column += length;
    at = end + 1;
  }
  return out + '\n';
}

std::string option_line(const Option& option) {
  std::string left = option.short_name ? fmt::format("  -{}, --{}", option.short_name, option.name)
                                       : fmt::format("      --{}", option.name);
  std::string help = option.help;
  if (option.kind == ValueKind::kChoice) {
    left += ' ' + fmt::format("{}", fmt::join(option.choices, "|"));
  } else if (!option.value_name.empty()) {
    left += ' ' + option.value_name;
  }
  const std::string& shown =
      option.initial_in_words.empty() ? option.initial : option.initial_in_words;
  if (!shown.empty() && option.kind != ValueKind::kFlag) help += fmt::format(" [{}]", shown);
  return left + wrapped(help, left.size());
}

/// "a, b or c".
std::string listed(const std::vector<std::string>& words) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i) {
    out += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  }
  return out;
}

std::string examples_text(const std::vector<Example>& examples) {
  if (examples.empty()) return {};
  std::string out = "\nExamples:\n";
  for (const Example& example : examples) out += fmt::format("  {}\n", example.command);
  return out;
}

}  // namespace

std::string version_text() {
  return fmt::format("distrain {} (LibTorch {})\nCUDA: {}\n", DISTRAIN_VERSION, torch_version(),
                     DISTRAIN_HAS_CUDA ? "compiled, never run on a GPU by us" : "not compiled");
}

std::string help_text(const Program& program) {
  std::string out = program.name;
  if (!program.about.summary.empty()) out += " - " + program.about.summary;
  out += fmt::format("\n\nUsage: {} COMMAND [OPTION]...\n\nCommands:\n", program.name);
  for (const JobCommand& command : program.commands) {
    out += fmt::format("  {:<11} {}\n", command.line.name, command.line.summary);
  }
  for (const TextCommand& command : text_commands(program)) {
    out += fmt::format("  {:<11} {}\n", command.line.name, command.line.summary);
  }
  return out +
         "\nOptions:\n"
         "  -h, --help     this text\n"
         "      --version  the version of distrain and of LibTorch\n\n"
         "Without --rank a command starts every rank of the job here and supervises them; with it, "
         "or\n"
         "under torchrun, mpirun or srun, the process is one rank. stdout is one JSON object a "
         "line.\n" +
         examples_text(program.about.examples);
}

std::string help_text(const Program& program, const JobCommand& command) {
  std::string out = fmt::format("{0} - {1}\n\nUsage: {0} [OPTION]...\n", program.call_of(command),
                                command.line.summary);
  if (program.commands.size() == 1) {  // this is all the help there is
    std::vector<std::string> others;
    for (const TextCommand& other : text_commands(program)) others.push_back(other.line.name);
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
                                command.line.name, command.line.summary, argument);
  if (!command.description.empty()) return out + command.description;
  const std::string left = "  " + command.argument;
  return out + left + wrapped(listed(command.choices), left.size());
}

std::vector<TextCommand> text_commands(const Program& program) {
  std::vector<std::string> jobs;
  for (const JobCommand& command : program.commands) jobs.push_back(command.line.name);
  // Each has a copy of what it needs: the program is a value, its jobs outlive all texts.
  const auto of_job = [program](const std::string& name, const auto& text) {
    for (const JobCommand& command : program.commands) {
      if (command.line.name == name) return text(program, command);
    }
    return text(program);
  };
  std::vector<TextCommand> commands = {
      {{"help", "how to use a command"},
       "COMMAND",
       jobs,
       false,
       [of_job](const std::string& name) {
         return of_job(name, [](const auto&... of) { return help_text(of...); });
       }},
      {{"man", "the man page of a command, or of all"},
       "COMMAND",
       jobs,
       false,
       [of_job](const std::string& name) {
         return of_job(name, [](const auto&... of) { return man_page(of...); });
       }},
      {{"completion", "a script that completes command lines"},
       "SHELL",
       {"bash", "zsh", "fish"},
       true,
       [program](const std::string& shell) { return completion(program, shell); }},
      {{"schema", "the JSON Schema of the lines that jobs print"},
       "EVENT",
       event_names(program),
       false,
       [program](const std::string& event) { return schema(program, event); }},
  };
  const auto predicts = [](const JobCommand& command) { return command.predict != nullptr; };
  if (std::any_of(program.commands.begin(), program.commands.end(), predicts)) {
    commands.insert(
        commands.begin(),
        TextCommand{{"predict", "what a trained model makes of examples, a line each"},
                    "CHECKPOINT [FILE] [OPTION]...",
                    {},
                    true,
                    {},
                    "CHECKPOINT is one that a job has saved, or a folder of them, whose newest "
                    "counts. Examples\ncome from FILE or standard input; the job's own page says "
                    "what they are. Options are the\njob's: of those of the model each has to be "
                    "what it was.\n"});
  }
  return commands;
}

}  // namespace distrain::app
