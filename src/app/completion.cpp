#include <algorithm>
#include <cctype>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/app/program.h"

namespace distrain::app {
namespace {

/// What a shell offers for an option's value.
struct Values {
  std::vector<std::string> words;
  bool files = false;
  bool folders = false;
  bool hosts = false;
  bool operator==(const Values&) const = default;
};

Values values_of(const Option& option) {
  const auto takes = [&option](const char* what) {
    return option.value_name.find(what) != std::string::npos;
  };
  return {option.choices, takes("FILE") || takes("PATH"), takes("DIR"), takes("HOST")};
}

/// What is alike for several commands comes once, with their names: in the order of the first.
using Rows = std::vector<std::pair<std::string, std::vector<std::string>>>;

void add(Rows& rows, const std::string& row, const std::string& command) {
  const auto same =
      std::find_if(rows.begin(), rows.end(), [&](const auto& other) { return other.first == row; });
  if (same == rows.end()) {
    rows.push_back({row, {command}});
  } else if (same->second.back() != command) {
    same->second.push_back(command);
  }
}

template <class Row>
Rows rows_of(const Program& program, const Row& row) {
  Rows rows;
  for (const JobCommand& command : program.commands) {
    for (const Option& option : command.table) {
      if (!option.hidden) add(rows, row(option), command.line.name);
    }
  }
  return rows;
}

/// A name for a shell's function.
std::string function_of(const Program& program) {
  std::string name = '_' + program.name;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}

/// In single quotes; `quote` stands for one in the text.
std::string quoted(const std::string& text, const char* quote) {
  std::string out;
  for (const char c : text) out += c == '\'' ? quote : std::string(1, c);
  return '\'' + out + '\'';
}

/// `text` with a backslash before each of `special`.
std::string marked(std::string text, const char* special) {
  for (size_t at = 0; (at = text.find_first_of(special, at)) != std::string::npos; at += 2) {
    text.insert(at, "\\");
  }
  return text;
}

std::string head(const Program& program, const std::string& shell) {
  return fmt::format("# {0} completion of {1}, written by `{1} completion {0}`\n", shell,
                     program.name);
}

std::string joined(const std::vector<std::string>& words, const char* by = " ") {
  return fmt::format("{}", fmt::join(words, by));
}

std::vector<std::string> all_commands(const Program& program) {
  std::vector<std::string> names;
  for (const JobCommand& command : program.commands) names.push_back(command.line.name);
  for (const TextCommand& command : text_commands(program)) names.push_back(command.line.name);
  return names;
}

// ---- bash ----

std::string bash_action(const Option& option) {
  if (option.kind == ValueKind::kFlag) return ":";  // the next word is an option again
  const Values values = values_of(option);
  std::string action;
  if (values.files || values.folders) {
    action += "compopt -o filenames; ";
  }
  std::string sources;
  const auto source = [&sources](const std::string& what) {
    sources += fmt::format("compgen {} -- \"$cur\"; ", what);
  };
  if (!values.words.empty()) source("-W '" + joined(values.words) + "'");
  if (values.files) source("-f");
  if (values.folders) source("-d");
  if (values.hosts) source("-A hostname");
  if (!sources.empty()) {
    sources.resize(sources.size() - 2);
    action += fmt::format("mapfile -t COMPREPLY < <({}); ", sources);
  }
  return action + "return";  // text and numbers: nothing to offer
}

std::string bash(const Program& program) {
  const std::string function = function_of(program);
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
  if (program.commands.size() == 1) {  // its name can be left out
    out += fmt::format("  [[ ${{COMP_WORDS[1]}} != -* ]] || command={}\n",
                       program.commands.front().line.name);
  }
  out += "  case $command in\n";
  for (const JobCommand& command : program.commands) {
    std::vector<std::string> names;
    for (const Option& option : command.table) {
      if (!option.hidden) names.push_back("--" + option.name);
    }
    out += fmt::format("    {}) options='{}' ;;\n", command.line.name, joined(names));
  }
  for (const TextCommand& command : text_commands(program)) {
    const std::string files =
        "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$cur\"); return";
    const std::string words =
        fmt::format("((COMP_CWORD == 2)) && options='{}'", joined(command.choices));
    out += fmt::format("    {}) {} ;;\n", command.line.name, command.text ? words : files);
  }
  out += fmt::format("    '') options='{} --help --version' ;;\n  esac\n  case $command/$prev in\n",
                     joined(all_commands(program)));
  Rows actions;  // with the patterns of all options that have the same
  const size_t jobs = program.commands.size();
  for (const auto& [row, commands] : rows_of(program, [](const Option& option) {
         return "--" + option.name + ' ' + bash_action(option);
       })) {
    const std::string name = row.substr(0, row.find(' '));
    const std::string action = row.substr(name.size() + 1);
    if (action == "return") continue;
    if (commands.size() == jobs) {
      add(actions, action, "*/" + name);
      continue;
    }
    for (const std::string& command : commands) add(actions, action, command + '/' + name);
  }
  for (const auto& [action, patterns] : actions) {
    out += fmt::format("    {})\n      {}\n      ;;\n", joined(patterns, " | "), action);
  }
  return out + "    */--*) return ;; # text and numbers\n  esac\n" +
         "  mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$cur\")\n}\n" +
         fmt::format("complete -F {} {}\n", function, program.name);
}

// ---- zsh ----

std::string zsh_quoted(const std::string& text) { return quoted(text, "'\\''"); }

std::string zsh_row(const Option& option) {
  std::string row = '[' + marked(option.help, "]\\") + ']';
  if (option.kind != ValueKind::kFlag) {
    const Values values = values_of(option);
    const std::string words = '(' + joined(values.words) + ')';
    const char* const other = values.files     ? "_files"
                              : values.folders ? "_files -/"
                              : values.hosts   ? "_hosts"
                                               : " ";
    row += ":value:";
    if (values.words.empty()) {
      row += other;
    } else if (values.files) {  // the first space: called as it stands
      row += fmt::format(" _alternative \"words\\:word\\:{}\" \"files\\:file\\:{}\"", words, other);
    } else {
      row += words;
    }
  }
  const std::string name = "--" + option.name;
  if (!option.short_name) return zsh_quoted(name + row);
  return fmt::format("{{-{},{}}}{}", option.short_name, name, zsh_quoted(row));
}

/// `_arguments` takes them as one word with a description each.
std::string zsh_commands(const Program& program) {
  std::string out;
  const auto add_line = [&out](const CommandLine& line) {
    out += fmt::format(" {}\\:\"{}\"", line.name, marked(line.summary, "\"\\"));
  };
  for (const JobCommand& command : program.commands) add_line(command.line);
  for (const TextCommand& command : text_commands(program)) add_line(command.line);
  return zsh_quoted("1:command:((" + out.substr(1) + "))");
}

std::string zsh(const Program& program) {
  std::string out = "#compdef " + program.name + '\n' + head(program, "zsh");
  const Rows rows = rows_of(program, zsh_row);
  const auto list = [&](const std::string& name, const auto& belongs) {
    out += name + "_options=(\n";
    for (const auto& [row, commands] : rows) {
      if (belongs(commands)) out += "  " + row + '\n';
    }
    out += ")\n";
  };
  const auto in_all = [&program](const std::vector<std::string>& commands) {
    return commands.size() == program.commands.size();
  };
  out += "local -a common_options";
  for (const JobCommand& command : program.commands) out += ' ' + command.line.name + "_options";
  out += '\n';
  list("common", in_all);
  for (const JobCommand& command : program.commands) {
    list(command.line.name, [&](const std::vector<std::string>& commands) {
      return !in_all(commands) &&
             std::find(commands.begin(), commands.end(), command.line.name) != commands.end();
    });
  }
  out +=
      "\nlocal context state line\n"
      "_arguments -C \\\n"
      "  '(- *)'{-h,--help}'[a summary of the commands]' \\\n"
      "  '(- *)--version[the versions of distrain and of LibTorch]' \\\n";
  // The name of a program's one job can be left out; all options are common to it.
  if (program.commands.size() == 1) out += "  $common_options \\\n";
  out += "  " + zsh_commands(program) +
         " \\\n  '*::argument:->argument'\n\n[[ $state == argument ]] || return\n"
         "case $line[1] in\n";
  for (const JobCommand& command : program.commands) {
    out += fmt::format("  {0}) _arguments ${0}_options $common_options ;;\n", command.line.name);
  }
  for (const TextCommand& command : text_commands(program)) {
    out += fmt::format("  {}) _arguments '{}' ;;\n", command.line.name,
                       command.text ? fmt::format("1:value:({})", joined(command.choices))
                                    : std::string("*:file:_files"));
  }
  return out + "esac\n";
}

// ---- fish ----

std::string fish_quoted(const std::string& text) { return quoted(marked(text, "\\"), "\\'"); }

std::string fish_row(const Option& option) {
  std::string row;
  const Values values = values_of(option);
  const bool paths = values.files || values.folders;
  if (option.kind != ValueKind::kFlag) row += paths ? "-r -F " : "-x ";
  if (option.short_name) row += fmt::format("-s {} ", option.short_name);
  row += "-l " + option.name;
  if (!values.words.empty()) row += " -a " + fish_quoted(joined(values.words));
  if (values.hosts) row += " -a '(__fish_print_hostnames)'";
  return row + " -d " + fish_quoted(option.help);
}

std::string fish(const Program& program) {
  const std::string complete = "complete -c " + program.name;
  std::string out = head(program, "fish") + complete + " -f\n";
  const auto subcommand = [&](const CommandLine& line) {
    out += fmt::format("{} -n __fish_use_subcommand -a {} -d {}\n", complete, line.name,
                       fish_quoted(line.summary));
  };
  for (const JobCommand& command : program.commands) subcommand(command.line);
  for (const TextCommand& command : text_commands(program)) subcommand(command.line);
  out += complete +
         " -n __fish_use_subcommand -l version -d 'the versions of distrain and of LibTorch'\n";
  out += complete + " -n __fish_use_subcommand -s h -l help -d 'a summary of the commands'\n";
  for (const TextCommand& command : text_commands(program)) {
    out += fmt::format("{} -n '__fish_seen_subcommand_from {}' {}\n", complete, command.line.name,
                       command.text ? "-a '" + joined(command.choices) + "'" : "-F");
  }
  for (const auto& [row, commands] : rows_of(program, fish_row)) {
    out += complete;
    // The name of a program's one job can be left out.
    if (program.commands.size() > 1) {
      out += fmt::format(" -n '__fish_seen_subcommand_from {}'", joined(commands));
    }
    out += ' ' + row + '\n';
  }
  return out;
}

}  // namespace

std::string completion(const Program& program, const std::string& shell) {
  if (shell == "bash") return bash(program);
  return shell == "zsh" ? zsh(program) : fish(program);
}

}  // namespace distrain::app
