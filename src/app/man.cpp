#include <algorithm>
#include <cctype>
#include <map>
#include <regex>
#include <sstream>

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "man_text.h"
#include "options.h"
#include "program.h"

namespace distrain::app {
namespace {

// Format of texts: empty lines separate paragraphs; lines that begin with four spaces are verbatim;
// "* term: " begins a list item. Words in backticks and options (--rank) become bold.

// Mark the begin and the end of bold text before escaped() replaces them.
constexpr char kBold = '\1', kRoman = '\2';

std::string escaped(std::string_view text) {
  static const std::map<char, std::string> kSpecial = {
      {'\\', "\\e"}, {'-', "\\-"}, {kBold, "\\fB"}, {kRoman, "\\fR"}};
  std::string out;
  for (const char c : text) {
    const auto special = kSpecial.find(c);
    out += special == kSpecial.end() ? std::string(1, c) : special->second;
  }
  return out;
}

std::string bold(const std::string& text) { return escaped(kBold + text + kRoman); }
std::string italic(std::string_view text) { return "\\fI" + escaped(text) + "\\fR"; }

/// Converts one line of text to roff.
std::string line_of(const std::string& text) {
  static const std::regex kWords("`([^`]*)`|(^|[^[:alnum:]-])(--[[:alnum:]][[:alnum:]-]*)");
  const bool request = text.starts_with('.') || text.starts_with('\'');
  return (request ? "\\&" : "") + escaped(std::regex_replace(text, kWords, "$2\1$1$3\2")) + '\n';
}

/// Converts a text to roff. If `first`, it follows a heading, which already begins a paragraph.
std::string paragraphs(const std::string& text, bool first = true) {
  enum class State { kBreak, kText, kTerms, kVerbatim } state = State::kBreak;
  std::string out;
  const auto enter = [&](State next, const char* how) {
    if (state == State::kVerbatim && next != state) out += ".fi\n.RE\n";
    if (next != state && *how != 0) out += how;
    state = next;
  };
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) {
      enter(State::kBreak, "");
    } else if (line.starts_with("    ")) {
      enter(State::kVerbatim, ".PP\n.RS 4\n.nf\n");
      out += (line[4] == '.' ? "\\&" : "") + escaped(line.substr(4)) + '\n';
    } else if (line.starts_with("* ")) {
      enter(State::kTerms, "");
      const size_t colon = line.find(": ");
      out += ".TP\n" + bold(line.substr(2, colon - 2)) + '\n' + line_of(line.substr(colon + 2));
    } else {
      if (state != State::kTerms) enter(State::kText, first ? "" : ".PP\n");
      out += line_of(line);
    }
    first = first && out.empty();
  }
  enter(State::kBreak, "");
  return out;
}

/// Replaces PROGRAM by the program's name and converts the text to roff.
std::string paragraphs_of(const Program& program, std::string text) {
  c10::ReplaceAll(text, "PROGRAM", program.name);
  return paragraphs(text);
}

std::string title(const Program& program, const std::string& page, const std::string& summary) {
  std::string upper = page;
  std::transform(upper.begin(), upper.end(), upper.begin(), ::toupper);
  const std::string& own = program.about.version;
  return fmt::format(
      ".TH {} 1 \"\" \"{}\" \"User Commands\"\n.SH NAME\n{}{}{}\n.SH SYNOPSIS\n", upper,
      own.empty() ? fmt::format("distrain {}", DISTRAIN_VERSION) : program.name + ' ' + own,
      escaped(page), summary.empty() ? "" : " \\- ", escaped(summary));
}

std::string item(const std::string& term, const std::string& text) {
  return ".TP\n" + term + '\n' + text;
}

std::string reference(const std::string& page) { return "\\fB" + escaped(page) + "\\fR(1)"; }

std::string names_of(const std::vector<job::DeviceRole>& roles) {
  std::string out, idle;
  for (const job::DeviceRole& role : roles) {
    if (role.use == job::DeviceRole::Use::kNone) {
      idle += fmt::format(" Always on the CPU: {}.", role.name);
      continue;
    }
    out += (out.empty() ? "Roles: " : "; ") + role.name;
    if (!role.alias.empty()) out += " or " + role.alias;
    if (role.use == job::DeviceRole::Use::kIfNamed) out += " (on the CPU unless named)";
  }
  return out.empty() ? out : out + ". ROLE may also name a single rank." + idle + '\n';
}

std::string option_item(const Option& option, const std::vector<job::DeviceRole>& roles) {
  std::string term = bold("--" + option.name);
  if (option.short_name) term = bold(std::string("-") + option.short_name) + ", " + term;
  if (option.kind == ValueKind::kChoice) {
    term += ' ' + bold(fmt::format("{}", fmt::join(option.choices, "|")));
  } else if (option.kind != ValueKind::kFlag) {
    term += ' ' + italic(option.value_name);
  }
  const std::string shown = default_in_words(option);
  std::string more = option.details;
  if (!more.empty() && !more.ends_with('\n')) more += '\n';
  if (option.name == "device") more += names_of(roles);
  return item(term, line_of(option.help + (shown.empty() ? "" : " (default: " + shown + ")") +
                            (more.empty() ? "" : ".")) +
                        paragraphs(more));
}

std::string options(const OptionTable& table, const std::vector<job::DeviceRole>& roles = {}) {
  std::string out = ".SH OPTIONS\n", group;
  for (const Option& option : table) {
    if (option.hidden) continue;
    if (option.group != group) out += fmt::format(".SS \"{}\"\n", option.group);
    group = option.group;
    out += option_item(option, roles);
  }
  return out;
}

std::string about_job(const JobCommand& command) {
  return command.description + "\n\n" + command.details + '\n' + kJobDescription;
}

std::string synopsis(const std::string& call) {
  return fmt::format("{} [{}]...\n", bold(call), italic("option"));
}

std::string synopsis(const Program& program, const TextCommand& command) {
  std::string argument = italic(command.argument);
  if (!command.needs_argument) argument = '[' + argument + ']';
  return fmt::format("{} {}\n", bold(program.name + ' ' + command.name), argument);
}

std::string fields(const std::vector<job::Field>& all) {
  std::string out;
  for (const job::Field& field : all) {
    out += item(bold(field.name), line_of(field.what));
    if (!field.fields.empty()) out += ".RS\n" + fields(field.fields) + ".RE\n";
  }
  return out;
}

std::string events(const std::vector<job::Event>& all) {
  std::string out;
  for (const job::Event& event : all) {
    if (event.name == "rank_end") {  // do not repeat the fields of `end`
      out += item(bold(event.name), line_of(event.when + ", with the fields of `end`"));
      continue;
    }
    const std::string when = event.when.empty() ? "has these additional fields" : event.when;
    out += item(bold(event.name), line_of(when) + ".RS\n" + fields(event.fields) + ".RE\n");
  }
  return out;
}

/// Returns the section EXAMPLES, each example below its caption; empty if there are none.
std::string examples(const std::vector<job::Example>& all) {
  if (all.empty()) return {};
  std::string text;
  for (const job::Example& example : all) {
    if (!example.what.empty()) text += example.what + ":\n\n";
    text += "    " + example.command + "\n\n";
  }
  return ".SH EXAMPLES\n" + paragraphs(text);
}

}  // namespace

std::string man_page(const Program& program) {
  const JobCommand* only = program.has_one_job() ? &program.commands.front() : nullptr;
  const About& about = program.about;
  std::string out =
      title(program, program.name, only && about.summary.empty() ? only->summary : about.summary);
  out += synopsis(only ? program.name : program.name + " COMMAND");
  std::string commands, pages;
  const auto add = [&](const std::string& name, const std::string& summary, bool has_page) {
    const std::string page = reference(program.name + '-' + name);
    commands += item(bold(name),
                     line_of(summary + (has_page ? "; see" : "")) + (has_page ? page + '\n' : ""));
    if (has_page) pages += page + ",\n";
  };
  for (const JobCommand& command : program.commands) {
    if (!only) add(command.name, command.summary, true);
  }
  for (const TextCommand& command : text_commands(program)) {
    out += ".br\n" + synopsis(program, command);
    add(command.name, command.summary, !command.options.empty());
  }
  out += fmt::format(".br\n{}\n.SH DESCRIPTION\n", bold(program.name + " --version"));
  out += paragraphs(about.description + (only ? "\n\n" + about_job(*only) : kProgramDescription));
  out += ".SH COMMANDS\n" + commands;
  out += only ? options(only->table, only->roles)
              : ".SH OPTIONS\n" +
                    item(bold("-h, --help"), "print a summary of all commands or of one\n") +
                    item(bold("-V, --version"), "print the versions of distrain and LibTorch\n");
  out += ".SH OUTPUT\n" + paragraphs_of(program, kOutput) + events(job::common_events());
  if (only) out += events(only->events);
  out += paragraphs(kOutputEnd, false);
  for (const auto& section : kSections) {
    out += fmt::format(".SH \"{}\"\n", section.title) + paragraphs_of(program, section.text);
  }
  std::vector<job::Example> shown = about.examples;
  if (only) shown.insert(shown.end(), only->examples.begin(), only->examples.end());
  return out + examples(shown) + ".SH \"SEE ALSO\"\n" + pages + reference("jq") + '\n';
}

std::string man_page(const Program& program, const JobCommand& command) {
  if (program.has_one_job()) return man_page(program);
  std::string out = title(program, program.name + '-' + command.name, command.summary);
  out += synopsis(program.call_of(command)) + ".SH DESCRIPTION\n";
  out += paragraphs(about_job(command));
  out += options(command.table, command.roles);
  const std::string main_page = reference(program.name) + '\n';
  out += ".SH OUTPUT\nStandard output is JSON lines, which are described in\n" +
         reference(program.name) + ".\n";
  if (!command.events.empty()) out += "This command adds:\n" + events(command.events);
  out += ".SH \"EXIT STATUS\"\nSee\n" + reference(program.name) + ".\n";
  return out + examples(command.examples) + ".SH \"SEE ALSO\"\n" + main_page;
}

std::string man_page(const Program& program, const TextCommand& command) {
  std::string out = title(program, program.name + '-' + command.name, command.summary);
  out += synopsis(program, command) + ".SH DESCRIPTION\n";
  out += command.description.empty()
             ? item(italic(command.argument), fmt::format("{}\n", fmt::join(command.choices, ", ")))
             : paragraphs(command.description);
  if (!command.options.empty()) out += options(command.options);
  return out + ".SH \"SEE ALSO\"\n" + reference(program.name) + '\n';
}

}  // namespace distrain::app
