// Reads the file of --config, and prints the options with the origin of each value.

#include <fstream>
#include <sstream>

#include <CLI/CLI.hpp>
#include <errno.h>
#include <fmt/ranges.h>
#include <string.h>

#include "distrain/base/text.h"
#include "program.h"

namespace distrain::app {
namespace {

constexpr size_t kMaxConfigBytes = 1 << 20;

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxConfigBytes + 1, '\0');
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) invalid("--config {}: {}", path, strerror(errno));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxConfigBytes || text.find('\0') != text.npos) {
    invalid("--config {}: is not a text file of at most 1 MiB", path);
  }
  return text.starts_with("\xEF\xBB\xBF") ? text.substr(3) : text;  // a byte order mark
}

/// Returns a line of TOML without its comment. CLI11 would also truncate texts at a '#', and it
/// does not know the backslashes of TOML.
std::string without_comment(const std::string& line, const std::string& where) {
  char quote = 0;
  size_t end = 0;
  for (; end < line.size() && (quote || line[end] != '#'); ++end) {
    const char c = line[end];
    if (quote && c == '\\') invalid("{}: a text cannot have a backslash", where);
    if (!quote && (line.compare(end, 3, "\"\"\"") == 0 || line.compare(end, 3, "'''") == 0)) {
      invalid("{}: a text cannot begin with three quotes", where);
    }
    if (quote ? c == quote : c == '"' || c == '\'') quote = quote ? 0 : c;
  }
  if (quote) invalid("{}: a text has no closing {}", where, quote);
  return CLI::detail::trim_copy(line.substr(0, end));
}

/// Returns the name and the values of the line `code`, such as "lr = 0.1" or "dense = [8, 8]".
CLI::ConfigItem item_of(const std::string& code, const std::string& where) {
  CLI::ConfigTOML format;
  format.comment('\0');
  std::istringstream stream(code);
  std::vector<CLI::ConfigItem> items = format.from_config(stream);
  if (code[0] == '[' || code.find('=') == code.npos || items.size() != 1 ||
      !items[0].parents.empty()) {
    invalid("{}: expected NAME = VALUE, without sections, not {}", where, base::in_quotes(code));
  }
  std::ranges::replace(items[0].name, '_', '-');
  for (std::string& value : items[0].inputs) CLI::detail::trim(value);
  if (items[0].inputs.size() > 1) std::erase(items[0].inputs, "");  // from '["a" , "b"]'
  return items[0];
}

}  // namespace

void read_config(ParsedOptions& options, const Program* program, const OptionMap* of_launcher) {
  for (const auto& [name, value] : of_launcher ? *of_launcher : OptionMap()) {
    options.set(name, value);
  }
  const std::string path = options.text("config");
  if (path.empty() || of_launcher) return;
  std::istringstream lines(read_text(path));
  int number = 0;
  std::map<const Option*, int> seen;  // with their lines
  for (std::string line; std::getline(lines, line);) {
    const std::string where = fmt::format("{}:{}", path, ++number);
    std::string code = without_comment(line, where);
    if (code.empty()) continue;
    const size_t value = code.find_first_not_of(" \t", std::min(code.find('='), code.size()) + 1);
    while (value < code.size() && code[value] == '[' && code.back() != ']') {
      if (!std::getline(lines, line)) invalid("{}: a list has no closing ]", where);
      code += without_comment(line, fmt::format("{}:{}", path, ++number));
    }
    const CLI::ConfigItem item = item_of(code, where);
    const Option* const option = find_option(options.table(), item.name);
    if (!option) {
      invalid("{}: unknown option {}{}", where, base::in_quotes(item.name),
              hint_of(options.table(), item.name, program));
    }
    if (option->scope == Scope::kInfo || option->name == "config") {
      invalid("{}: give --{} on the command line", where, option->name);
    }
    const auto [first, is_new] = seen.emplace(option, number);
    if (!is_new) invalid("{}: {} is set in line {} already", where, item.name, first->second);
    const std::string text = fmt::format("{}", fmt::join(item.inputs, ","));
    const bool is_list = option->value_name.find("[,...]") != option->value_name.npos;
    if (item.inputs.size() > 1 && !is_list) {
      invalid("{}: {} takes one value, not '{}'", where, item.name, text);
    }
    const auto canonical = canonical_value(*option, text, fmt::format("{}: {}", where, item.name));
    if (options.values().contains(option->name)) continue;  // the command line wins
    options.set(option->name, canonical, "config file " + path);
  }
}

Json config_fields(const ParsedOptions& options, bool inherits) {
  Json values = Json::object(), origins = Json::object();
  for (const Option& option : options.table()) {
    if (option.scope == Scope::kInfo) continue;
    const std::string name = json_name(option);
    const bool is_open = inherits && is_job_option(option) && !options.given(option.name);
    values[name] = is_open ? Json() : json_value(option, options.text(option.name));
    origins[name] = is_open ? "rank 0" : options.origin(option.name);
  }
  return {{"config", values}, {"origins", origins}};
}

std::string config_file(const ParsedOptions& options, bool inherits) {
  const Json fields = config_fields(options, inherits);
  std::string out, group;
  for (const Option& option : options.table()) {
    if (option.scope == Scope::kInfo) continue;
    if (option.group != group) out += fmt::format("\n# {}\n", option.group);
    group = option.group;
    const Json& json = fields["config"][json_name(option)];
    std::string value =
        json.is_null() ? "" : json.dump(-1, ' ', false, Json::error_handler_t::replace);
    // Leave out texts with a quote or backslash, which read_config() does not accept, and the
    // options that request this output.
    const bool is_active = options.values().contains(option.name) &&
                           value.find('\\') == value.npos && option.name != "config" &&
                           (option.name != "pretty" || options.origin("pretty") != "command line");
    const std::string line = fmt::format("{}{} = {}", is_active ? "" : "# ", option.name, value);
    const Json& origin = fields["origins"][json_name(option)];
    out += fmt::format("{:<32}  # {}\n", line, origin.get<std::string>());
  }
  return out.substr(1);
}

}  // namespace distrain::app
