#include "distrain/app/help.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

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

}  // namespace

std::string version_text() {
  return fmt::format("distrain {} (LibTorch {})\nCUDA: {}\n", DISTRAIN_VERSION, torch_version(),
                     DISTRAIN_HAS_CUDA ? "compiled, never run on a GPU by us" : "not compiled");
}

std::string main_help(const std::vector<CommandLine>& commands) {
  std::string out =
      "distrain - distributed training over RPC, in C++ on LibTorch\n\n"
      "Usage: distrain COMMAND [OPTION]...\n\nCommands:\n";
  for (const CommandLine& command : commands) {
    out += fmt::format("  {:<10} {}\n", command.name, command.summary);
  }
  out += fmt::format("  {:<10} {}\n", "help", "how to use a command: distrain help COMMAND");
  out +=
      "\nOptions:\n"
      "  -h, --help     this text\n"
      "      --version  the version of distrain and of LibTorch\n\n"
      "Without --rank a command starts every rank of the job here and supervises them; with it, "
      "or\n"
      "under torchrun, mpirun or srun, the process is one rank. stdout is one JSON object a "
      "line.\n\n"
      "Examples:\n"
      "  distrain hybrid\n"
      "  distrain hybrid --trainers 4 --mode sync | jq -c 'select(.event==\"end\")'\n"
      "  distrain hybrid --rank 0 --master-addr node0    # and --rank 1, 2, 3 on other machines\n";
  return out;
}

std::string command_help(const CommandLine& command, const std::string& description,
                         const OptionTable& table, const std::vector<std::string>& examples) {
  std::string out = fmt::format("distrain {} - {}\n\nUsage: distrain {} [OPTION]...\n\n{}\n",
                                command.name, command.summary, command.name, description);
  std::string group;
  for (const Option& option : table) {
    if (option.hidden) continue;
    if (option.group != group) {
      group = option.group;
      out += fmt::format("\n{}:\n", group);
    }
    out += option_line(option);
  }
  out += "\nExamples:\n";
  for (const std::string& example : examples) out += fmt::format("  {}\n", example);
  return out;
}

std::string dump_options(const CommandLine& command, const OptionTable& table) {
  constexpr const char* kKinds[] = {"flag", "integer", "integers", "real", "text", "choice"};
  constexpr const char* kScopes[] = {"job", "input", "rank", "placement", "info"};
  Json options = Json::array();
  for (const Option& option : table) {
    Json row{{"name", option.name},
             {"kind", kKinds[static_cast<int>(option.kind)]},
             {"scope", kScopes[static_cast<int>(option.scope)]},
             {"default", json_value(option, option.initial)},
             {"help", option.help},
             {"hidden", option.hidden}};
    if (option.initial.empty()) row["default"] = nullptr;
    if (option.short_name) row["short"] = std::string(1, option.short_name);
    if (!option.choices.empty()) row["choices"] = option.choices;
    if (option.kind == ValueKind::kInteger || option.kind == ValueKind::kIntegers ||
        option.kind == ValueKind::kReal) {
      row["min"] = option.min;
      row["max"] = option.max;
    }
    options.push_back(std::move(row));
  }
  return Json{{"command", command.name}, {"options", std::move(options)}}.dump(2) + '\n';
}

}  // namespace distrain::app
