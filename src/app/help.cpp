#include <algorithm>
#include <sstream>

#include <fmt/ranges.h>
#include <torch/version.h>

#include "program.h"

namespace distrain::app {
namespace {

constexpr size_t kHelpColumn = 26;
constexpr size_t kWidth = 80;

constexpr const char* kOfPredict =
    R"(CHECKPOINT is a checkpoint of a job, or a folder of checkpoints, which means its
newest one. Examples are read from FILE, or from standard input if FILE is - or
missing; the man page of the job describes their format. Options that define the
model come from the checkpoint, and giving one of them another value is refused.
)";

constexpr const char* kOfReport =
    R"(Makes one HTML page from the JSON lines of one or several runs: how each run
ended, with the root cause of a failure, charts, ranks, and the options that
differ from the defaults. The page needs no network and no other file. A FILE
may have several runs, a run may be spread over several FILEs, one for each
rank, and - is standard input. FILEs may be compressed with gzip. Without -o
the page goes to standard output, unless that is a terminal.
)";

/// Wraps `text` at kWidth and indents it by kHelpColumn; the first line already has `used` columns.
std::string wrapped(const std::string& text, size_t used) {
  const std::string new_line = '\n' + std::string(kHelpColumn, ' ');
  std::string out = used + 2 > kHelpColumn ? new_line : std::string(kHelpColumn - used, ' ');
  size_t column = kHelpColumn;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ' '); column += word.size()) {
    if (column > kHelpColumn && column + 1 + word.size() > kWidth) {
      out += new_line;
      column = kHelpColumn;
    } else if (column > kHelpColumn) {
      out += ' ';
      ++column;
    }
    out += word;
  }
  return out + '\n';
}

/// Returns the option with its value, such as "--rows N", "--mode async|sync" or "--local".
std::string call_of(const Option& option) {
  const bool is_choice = option.kind == ValueKind::kChoice;
  const std::string value =
      is_choice ? fmt::format("{}", fmt::join(option.choices, "|")) : option.value_name;
  return fmt::format("--{}{}{}", option.name, value.empty() ? "" : " ", value);
}

std::string options_text(const OptionTable& table) {
  std::string out, group;
  for (const Option& option : table) {
    if (option.group != group) out += fmt::format("\n{}:\n", option.group);
    group = option.group;
    const std::string left =
        (option.short_name ? fmt::format("  -{}, ", option.short_name) : std::string(6, ' ')) +
        call_of(option);
    const std::string shown = default_in_words(option);
    out += left + wrapped(option.help + (shown.empty() ? "" : " [" + shown + "]"), left.size());
  }
  return out;
}

std::string examples_text(const std::vector<job::Example>& examples) {
  std::string out = examples.empty() ? "" : "\nExamples:\n";
  for (const job::Example& example : examples) {
    if (!example.what.empty()) out += fmt::format("  # {}\n", example.what);
    out += fmt::format("  {}\n", example.command);
  }
  return out;
}

/// Returns `text(command)` for the command `name`, or `text()` if there is no such command.
std::string of_command(const Program& program, const std::string& name, const auto& text) {
  if (const JobCommand* job = program.find(name)) return text(*job);
  for (const TextCommand& command : text_commands(program)) {
    if (command.name == name) return text(command);
  }
  return text();
}

/// Returns the options of `predict`, from all jobs that support it.
OptionTable predict_options(const Program& program) {
  OptionTable table;
  for (const JobCommand& job : program.commands) {
    for (const Option& option : job.table) {
      if (!job.has_predict || !option.of_predict || job::find_option(table, option.name)) continue;
      table.push_back(option);
    }
  }
  std::stable_partition(table.begin(), table.end(),
                        [](const Option& option) { return option.group != "Run"; });
  return table;
}

}  // namespace

std::string version_text(const Program& program) {
  const std::string& version = program.about.version;
  const std::string own = program.name + (version.empty() ? "" : " ") + version + " (";
  const bool is_own = program.name != "distrain";
  return fmt::format("{}distrain {}{}LibTorch {})\nCUDA: {}\n", is_own ? own : "", DISTRAIN_VERSION,
                     is_own ? ", " : " (", TORCH_VERSION,
                     DISTRAIN_HAS_CUDA ? "compiled, tested on one GPU" : "not compiled");
}

std::string help_text(const Program& program) {
  if (program.has_one_job()) return help_text(program, program.commands.front());
  std::string out = program.name;
  if (!program.about.summary.empty()) out += " - " + program.about.summary;
  out += fmt::format("\n\nUsage: {} COMMAND [OPTION]...\n\nJobs:\n", program.name);
  for (const auto& [name, summary] : subcommands(program)) {
    if (name == text_commands(program).front().name) out += "\nOther commands:\n";
    out += fmt::format("  {:<11} {}\n", name, summary);
  }
  std::vector<job::Example> examples = program.about.examples;
  examples.resize(std::min<size_t>(examples.size(), 3));
  return fmt::format(
      "{1}{2}\n{0} COMMAND --help shows the options of a command, {0} man | man -l -\n"
      "the manual, and {0} --version the versions of distrain and LibTorch.\n",
      program.name, out, examples_text(examples));
}

std::string help_text(const Program& program, const JobCommand& command) {
  std::string required;
  for (const Option& option : command.table) {
    if (option.is_required) required += call_of(option) + ' ';
  }
  std::string out = fmt::format("{0} - {1}\n\nUsage: {0} {2}[OPTION]...\n",
                                program.call_of(command), command.summary, required);
  if (program.has_one_job()) {  // there is no separate help of the program
    std::vector<std::string> others;
    for (const TextCommand& other : text_commands(program)) others.push_back(other.name);
    out += fmt::format("       {} {}\n", program.name, fmt::join(others, "|"));
  }
  if (!command.description.empty()) out += '\n' + command.description + '\n';
  return out + options_text(command.table) + examples_text(command.examples);
}

std::string help_text(const Program& program, const TextCommand& command) {
  const std::string argument =
      command.needs_argument ? command.argument : '[' + command.argument + ']';
  std::string out = fmt::format("{0} {1} - {2}\n\nUsage: {0} {1} {3}\n\n", program.name,
                                command.name, command.summary, argument);
  out += command.description;
  if (!command.description.empty()) return out + options_text(command.options);
  const std::string left = "  " + command.argument;
  return out + left + wrapped(fmt::format("{}", fmt::join(command.choices, ", ")), left.size());
}

std::vector<TextCommand> text_commands(const Program& program) {
  const auto help = [](const Program& of, const std::string& name) {
    return of_command(of, name, [&](const auto&... command) { return help_text(of, command...); });
  };
  const auto man = [](const Program& of, const std::string& name) {
    return of_command(of, name, [&](const auto&... command) { return man_page(of, command...); });
  };
  const std::vector<std::string> shells = {"bash", "zsh", "fish"};
  std::vector<TextCommand> commands = {
      {.name = "report",
       .summary = "make an HTML page from the JSON lines of runs",
       .argument = "FILE... [OPTION]...",
       .needs_argument = true,
       .description = kOfReport,
       .options = report_options(),
       .run = [](const Program& of, const auto& args,
                 auto) { return run_report_command(of, args); }},
      {"help", "print the help of a command", "COMMAND", {}, false, help},
      {"man", "print a man page; pipe it to man -l -", "COMMAND", {}, false, man},
      {"completion", "print the completion script of a shell", "SHELL", shells, true, completion},
      {"schema", "print the JSON Schema of the lines on stdout", "EVENT", event_names(program),
       false, schema},
  };
  if (std::ranges::any_of(program.commands, &JobCommand::has_predict)) {
    commands.insert(
        commands.begin(),
        TextCommand{.name = "predict",
                    .summary = "apply a saved model to examples, one JSON line for each",
                    .argument = "CHECKPOINT [FILE] [OPTION]...",
                    .needs_argument = true,
                    .description = kOfPredict,
                    .options = predict_options(program),
                    .run = run_predict_command});
  }
  std::vector<std::string> names;
  for (const JobCommand& job : program.commands) names.push_back(job.name);
  for (const TextCommand& command : commands) names.push_back(command.name);
  for (TextCommand& command : commands) {
    if (command.argument == "COMMAND") command.choices = names;
  }
  return commands;
}

std::vector<std::pair<std::string, std::string>> subcommands(const Program& program) {
  std::vector<std::pair<std::string, std::string>> lines;
  for (const JobCommand& job : program.commands) lines.emplace_back(job.name, job.summary);
  for (const auto& text : text_commands(program)) lines.emplace_back(text.name, text.summary);
  return lines;
}

}  // namespace distrain::app
