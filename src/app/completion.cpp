#include <cctype>

#include <c10/util/StringUtil.h>
#include <fmt/ranges.h>

#include "program.h"

namespace distrain::app {
namespace {

/// Kinds of values, besides choices, that a shell can complete for an option.
enum Source { kNothing, kFiles, kFolders, kHosts };

Source source_of(const Option& option) {
  const auto takes = [&option](const char* what) {
    return option.value_name.find(what) != std::string::npos;
  };
  if (takes("FILE")) return kFiles;
  if (takes("DIR") || takes("PATH")) return kFolders;  // a checkpoint is a folder
  return takes("HOST") ? kHosts : kNothing;
}

/// Maps each text to the commands that share the text. Keeps the texts in order of insertion.
using Rows = nlohmann::ordered_map<std::string, std::vector<std::string>>;

/// Returns the options of each command that has some: the jobs, then `predict`.
std::vector<std::pair<std::string, OptionTable>> tables_of(const Program& program) {
  std::vector<std::pair<std::string, OptionTable>> tables;
  for (const JobCommand& job : program.commands) tables.emplace_back(job.name, job.table);
  for (const TextCommand& text : text_commands(program)) {
    if (!text.options.empty()) tables.emplace_back(text.name, text.options);
  }
  return tables;
}

/// Returns `text` in single quotes; `quote` replaces each single quote inside it.
std::string quoted(std::string text, const char* quote) {
  c10::ReplaceAll(text, "'", quote);
  return '\'' + text + '\'';
}

/// Returns `text` with a backslash before each character of `special`.
std::string marked(std::string text, const char* special) {
  for (size_t at = 0; (at = text.find_first_of(special, at)) != std::string::npos; at += 2) {
    text.insert(at, "\\");
  }
  return text;
}

std::string head(const Program& of, const std::string& shell) {
  return fmt::format("# {0} completion of {1}, written by `{1} completion {0}`\n", shell, of.name);
}

std::string joined(const std::vector<std::string>& words, const char* by = " ") {
  return fmt::format("{}", fmt::join(words, by));
}

// ---- bash ----

/// Returns the code that completes the option's value; empty if there is nothing to offer.
std::string bash_action(const Option& option) {
  if (option.kind == ValueKind::kFlag) return ":";  // then the next word is completed as an option
  constexpr const char* kSources[] = {"", "-f", "-d", "-A hostname"};
  const Source source = source_of(option);
  std::vector<std::string> calls;
  if (!option.choices.empty()) calls.push_back("-W '" + joined(option.choices) + "'");
  if (source != kNothing) calls.emplace_back(kSources[source]);
  if (calls.empty()) return {};
  for (std::string& call : calls) call = "compgen " + call + " -- \"$cur\"";
  const bool paths = source == kFiles || source == kFolders;
  return fmt::format("{}mapfile -t COMPREPLY < <({}); return",
                     paths ? "compopt -o filenames; " : "", joined(calls, "; "));
}

std::string bash(const Program& program) {
  std::string function = '_' + program.name;
  for (char& c : function) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  std::string out =
      head(program, "bash") + function + "() {\n" +
      R"(  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} options=
  local command=
  COMPREPLY=()
  # `--option=value` comes as three words.
  if [[ $cur == '=' ]]; then
    cur=
  elif [[ $prev == '=' ]]; then
    prev=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  prev=${prev//_/-}
  ((COMP_CWORD > 1)) && command=${COMP_WORDS[1]}
)";
  if (program.has_one_job()) {  // the user may omit the job's name
    out += "  [[ ${COMP_WORDS[1]} != -* ]] || command=" + program.commands.front().name + '\n';
  }
  out += "  case $command in\n";
  Rows actions;  // maps each action to the patterns of the options that share it
  for (const auto& [command, table] : tables_of(program)) {
    std::vector<std::string> names;
    for (const Option& option : table) {
      names.push_back("--" + option.name);
      const std::string action = bash_action(option);
      if (!action.empty()) actions[action].push_back(command + "/--" + option.name);
    }
    out += fmt::format("    {}) options='{}' ;;\n", command, joined(names));
  }
  for (const TextCommand& command : text_commands(program)) {
    if (!command.text) continue;
    out += fmt::format("    {}) ((COMP_CWORD == 2)) && options='{}' ;;\n", command.name,
                       joined(command.choices));
  }
  out += "    '') options='";
  for (const auto& [name, summary] : subcommands(program)) out += name + ' ';
  out += "--help --version' ;;\n  esac\n  case $command/$prev in\n";
  for (const auto& [action, patterns] : actions) {
    out += fmt::format("    {})\n      {}\n      ;;\n", joined(patterns, " | "), action);
  }
  return out + R"(    */--*) return ;; # text and numbers
    predict/* | report/*)
      if [[ $cur != -* ]]; then
        local kind=-f
        [[ $command == predict ]] && ((COMP_CWORD == 2)) && kind=-d # the checkpoint
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen $kind -- "$cur")
        return
      fi
      ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
}
)" + fmt::format("complete -F {} {}\n", function, program.name);
}

// ---- zsh ----

std::string zsh_quoted(const std::string& text) { return quoted(text, "'\\''"); }

std::string zsh_row(const Option& option) {
  constexpr const char* kSources[] = {" ", "_files", "_files -/", "_hosts"};
  const Source source = source_of(option);
  const std::string words = '(' + joined(option.choices) + ')';
  std::string value = option.choices.empty() ? kSources[source] : words;
  if (!option.choices.empty() && (source == kFiles || source == kFolders)) {
    value = fmt::format(" _alternative \"words\\:word\\:{}\" \"files\\:file\\:{}\"", words,
                        kSources[source]);  // zsh runs an action with a leading space unchanged
  }
  std::string row = '[' + marked(option.help, "]\\") + ']';
  if (option.kind != ValueKind::kFlag) row += ":value:" + value;
  const std::string name = "--" + option.name;
  if (!option.short_name) return zsh_quoted(name + row);
  return fmt::format("{{-{},{}}}{}", option.short_name, name, zsh_quoted(row));
}

std::string zsh(const Program& program) {
  std::string out = "#compdef " + program.name + '\n' + head(program, "zsh");
  for (const auto& [command, table] : tables_of(program)) {
    out += "local -a " + command + "_options=(\n";
    for (const Option& option : table) out += "  " + zsh_row(option) + '\n';
    out += ")\n";
  }
  out += R"(
local context state line
_arguments -C \
  '(- *)'{-h,--help}'[a summary of the commands]' \
  '(- *)'{-V,--version}'[the versions of distrain and of LibTorch]' \
)";
  // If a program has only one job, the user may omit the job's name.
  if (program.has_one_job()) out += "  $" + program.commands.front().name + "_options \\\n";
  std::string commands;  // name:"summary" of each command
  for (const auto& [name, summary] : subcommands(program)) {
    commands += fmt::format(" {}\\:\"{}\"", name, marked(summary, "\"\\"));
  }
  out += "  " + zsh_quoted("1:command:((" + commands.substr(1) + "))") + R"( \
  '*::argument:->argument'

[[ $state == argument ]] || return
case $line[1] in
)";
  for (const JobCommand& command : program.commands) {
    out += fmt::format("  {0}) _arguments ${0}_options ;;\n", command.name);
  }
  for (const TextCommand& command : text_commands(program)) {
    std::string words = "'1:value:(" + joined(command.choices) + ")'";
    if (command.name == "predict")
      words = "'1:checkpoint:_files -/' '2:file:_files' $predict_options";
    if (command.name == "report") words = "'*:file:_files' $report_options";
    out += fmt::format("  {}) _arguments {} ;;\n", command.name, words);
  }
  return out + "esac\n";
}

// ---- fish ----

std::string fish_quoted(const std::string& text) { return quoted(marked(text, "\\"), "\\'"); }

std::string fish_row(const Option& option) {
  const Source source = source_of(option);
  std::string row;
  if (option.kind != ValueKind::kFlag) {
    row += source == kFiles || source == kFolders ? "-r -F " : "-x ";
  }
  if (option.short_name) row += fmt::format("-s {} ", option.short_name);
  row += "-l " + option.name;
  if (!option.choices.empty()) row += " -a " + fish_quoted(joined(option.choices));
  if (source == kHosts) row += " -a '(__fish_print_hostnames)'";
  return row + " -d " + fish_quoted(option.help);
}

std::string fish(const Program& program) {
  const std::string complete = "complete -c " + program.name + ' ';
  const std::string first = complete + "-n __fish_use_subcommand ";
  std::string out = head(program, "fish") + complete + "-f\n";
  for (const auto& [name, summary] : subcommands(program)) {
    out += fmt::format("{}-a {} -d {}\n", first, name, fish_quoted(summary));
  }
  out += first + "-s V -l version -d 'the versions of distrain and of LibTorch'\n";
  out += first + "-s h -l help -d 'a summary of the commands'\n";
  for (const TextCommand& command : text_commands(program)) {
    out += fmt::format("{}-n '__fish_seen_subcommand_from {}' {}\n", complete, command.name,
                       command.text ? "-a '" + joined(command.choices) + "'" : "-F");
  }
  Rows rows;
  for (const auto& [command, table] : tables_of(program)) {
    for (const Option& option : table) rows[fish_row(option)].push_back(command);
  }
  for (const auto& [row, commands] : rows) {
    const std::string condition = "-n '__fish_seen_subcommand_from " + joined(commands) + "' ";
    // If a program has only one job, the user may omit the job's name.
    out += complete + (program.has_one_job() ? "" : condition) + row + '\n';
  }
  return out;
}

}  // namespace

std::string completion(const Program& program, const std::string& shell) {
  if (shell == "bash") return bash(program);
  return shell == "zsh" ? zsh(program) : fish(program);
}

}  // namespace distrain::app
