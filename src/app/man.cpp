#include <algorithm>
#include <cctype>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "distrain/app/program.h"
#include "man_text.h"

namespace distrain::app {
namespace {

// Texts are paragraphs with an empty line between. Lines that begin with four spaces are shown as
// they are; lines that begin with "* term: " are a list of terms. `Words` in backticks and options
// (--rank) become bold.

std::string escaped(char c) { return c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c); }

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) out += escaped(c);
  return out;
}

std::string bold(std::string_view text) { return "\\fB" + escaped(text) + "\\fR"; }
std::string italic(std::string_view text) { return "\\fI" + escaped(text) + "\\fR"; }

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-'; }

/// The length of the option that `text` begins with; 0: none.
size_t option_length(std::string_view text) {
  if (!text.starts_with("--") || text.size() < 3 || !is_word(text[2]) || text[2] == '-') return 0;
  return static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_word) - text.begin());
}

/// One line.
std::string line_of(std::string_view text) {
  std::string out;
  if (text.starts_with('.') || text.starts_with('\'')) out = "\\&";  // no request
  for (size_t i = 0; i < text.size();) {
    size_t length = 1;
    const size_t quote = text[i] == '`' ? text.find('`', i + 1) : std::string_view::npos;
    if (quote != std::string_view::npos) {
      out += bold(text.substr(i + 1, quote - i - 1));
      length = quote + 1 - i;
    } else if ((i == 0 || !is_word(text[i - 1])) && option_length(text.substr(i)) > 0) {
      length = option_length(text.substr(i));
      out += bold(text.substr(i, length));
    } else {
      out += escaped(text[i]);
    }
    i += length;
  }
  return out + '\n';
}

/// `first`: it follows a heading, which makes a paragraph by itself.
std::string paragraphs(std::string_view text, bool first = true) {
  enum class State { kBreak, kText, kTerms, kVerbatim } state = State::kBreak;
  std::string out;
  const auto enter = [&](State next, const char* how) {
    if (state == State::kVerbatim && next != state) out += ".fi\n.RE\n";
    if (next != state && *how != 0) out += how;
    state = next;
  };
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
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

/// PROGRAM in the text stands for the program's name.
std::string paragraphs_of(const Program& program, std::string text, bool first = true) {
  constexpr std::string_view kName = "PROGRAM";
  for (size_t at = 0; (at = text.find(kName, at)) != std::string::npos;) {
    text.replace(at, kName.size(), program.name);
    at += program.name.size();
  }
  return paragraphs(text, first);
}

std::string title(const std::string& page, const std::string& summary) {
  std::string upper = page;
  std::transform(upper.begin(), upper.end(), upper.begin(), ::toupper);
  return fmt::format(
      ".TH {} 1 \"\" \"distrain {}\" \"User Commands\"\n.SH NAME\n{}{}{}\n.SH SYNOPSIS\n", upper,
      DISTRAIN_VERSION, escaped(page), summary.empty() ? "" : " \\- ", escaped(summary));
}

std::string item(const std::string& term, const std::string& text) {
  return ".TP\n" + term + '\n' + text;
}

std::string reference(const std::string& page) { return "\\fB" + escaped(page) + "\\fR(1)"; }

std::string names_of_roles(const DeviceRules& rules) {
  std::string out, idle;
  for (const cuda::DeviceRole& role : rules.roles) {
    if (role.use == cuda::DeviceRole::Use::kNone) {
      idle += fmt::format(" On the CPU in any case: {}.", role.name);
      continue;
    }
    out += (out.empty() ? "Roles: " : "; ") + role.name;
    if (!role.alias.empty()) out += " or " + role.alias;
    if (role.use == cuda::DeviceRole::Use::kIfNamed) out += " (on the CPU unless it is named)";
  }
  return out.empty() ? out
                     : out + ". The ranks of a role have its name and a number." + idle + '\n';
}

std::string option_item(const Option& option, const DeviceRules& devices) {
  std::string term = bold("--" + option.name);
  if (option.short_name) term = bold(std::string("-") + option.short_name) + ", " + term;
  std::string text = option.help;
  if (option.kind == ValueKind::kChoice) {
    term += ' ' + bold(fmt::format("{}", fmt::join(option.choices, "|")));
  } else if (option.kind != ValueKind::kFlag) {
    term += ' ' + italic(option.value_name);
  }
  const std::string& initial =
      option.initial_in_words.empty() ? option.initial : option.initial_in_words;
  if (!initial.empty() && option.kind != ValueKind::kFlag) {
    text += fmt::format(" (default: {})", initial);
  }
  std::string more = option.details;
  if (!more.empty() && !more.ends_with('\n')) more += '\n';
  if (option.name == "device") more += names_of_roles(devices);
  return item(term, line_of(text + (more.empty() ? "" : ".")) + paragraphs(more));
}

std::string options(const JobCommand& command) {
  std::string out = ".SH OPTIONS\n";
  std::string group;
  for (const Option& option : command.table) {
    if (option.hidden) continue;
    if (option.group != group) out += fmt::format(".SS \"{}\"\n", option.group);
    group = option.group;
    out += option_item(option, command.devices);
  }
  return out;
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
    if (event.name == "rank_end") {  // once is enough
      out += item(bold(event.name), line_of(event.when + ", with the fields of `end`"));
      continue;
    }
    const std::string when = event.when.empty() ? "has these, too, if there are such" : event.when;
    out += item(bold(event.name), line_of(when) + ".RS\n" + fields(event.fields) + ".RE\n");
  }
  return out;
}

/// Each with what it shows, if that is said.
std::string examples(const std::vector<Example>& all) {
  if (all.empty()) return {};
  std::string text;
  for (const Example& example : all) {
    if (!example.what.empty()) text += example.what + ":\n\n";
    text += "    " + example.command + "\n\n";
  }
  return ".SH EXAMPLES\n" + paragraphs(text);
}

}  // namespace

std::string man_page(const Program& program) {
  std::string out = title(program.name, program.about.summary);
  out += fmt::format("{} {} [{}]...\n", bold(program.name), italic("command"), italic("option"));
  std::string commands, others, pages;
  for (const JobCommand& command : program.commands) {
    const std::string page = program.name + '-' + command.line.name;
    commands += item(bold(command.line.name),
                     line_of(command.line.summary + "; see") + reference(page) + '\n');
    pages += reference(page) + ",\n";
  }
  for (const TextCommand& command : text_commands(program)) {
    std::string argument = italic(command.argument);
    if (!command.needs_argument) argument = '[' + argument + ']';
    out += fmt::format(".br\n{} {}\n", bold(program.name + ' ' + command.line.name), argument);
    commands += item(bold(command.line.name),
                     line_of(command.line.summary + (command.description.empty() ? "" : ".")) +
                         paragraphs(command.description));
  }
  out += fmt::format(".br\n{}\n.SH DESCRIPTION\n", bold(program.name + " --version"));
  out += paragraphs(program.about.description + kProgramDescription);
  out += ".SH COMMANDS\n" + commands + ".SH OPTIONS\n";
  out += item(bold("-h") + ", " + bold("--help"), "a summary of the commands, or of one\n");
  out += item(bold("--version"), "the versions of distrain and of LibTorch\n");
  out += ".SH OUTPUT\n" + paragraphs_of(program, kOutput);
  out += events(job::common_events()) + paragraphs(kOutputEnd, false);
  for (const ManSection& section : kSections) {
    out += fmt::format(".SH \"{}\"\n", section.title) + paragraphs_of(program, section.text);
  }
  return out + examples(program.about.examples) + ".SH \"SEE ALSO\"\n" + pages + reference("jq") +
         '\n';
}

std::string man_page(const Program& program, const JobCommand& command) {
  std::string out = title(program.name + '-' + command.line.name, command.line.summary);
  out += fmt::format("{} [{}]...\n.SH DESCRIPTION\n", bold(program.call_of(command)),
                     italic("option"));
  out += paragraphs(command.description + "\n\n" + command.details + '\n' + kJobDescription);
  out += options(command);
  const std::string main_page = reference(program.name) + '\n';
  out += ".SH OUTPUT\nJSON lines, as\n" + main_page + "says.";
  if (!command.events.empty())
    out += " Of this command:\n" + events(command.events);
  else
    out += '\n';
  out += ".SH \"EXIT STATUS\"\nAs in\n" + reference(program.name) + ".\n";
  return out + examples(command.examples) + ".SH \"SEE ALSO\"\n" + main_page;
}

}  // namespace distrain::app
