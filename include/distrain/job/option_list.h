#pragma once

#include <set>
#include <type_traits>

#include "distrain/base/text.h"
#include "distrain/job/job.h"

namespace distrain::job {

enum class ValueKind { kFlag, kInteger, kIntegers, kReal, kText, kChoice };

/// The processes that an option applies to.
enum class Scope {
  kJob,        ///< all ranks use rank 0's value; the user may give other ranks only this value
  kInput,      ///< like kJob, but the user may give another rank its own value (a path)
  kRank,       ///< this process only
  kPlacement,  ///< sets which ranks run where
  kInfo,       ///< prints something and exits
};

/// One option, for the parser, help, man pages, completions, the schema of `start` lines and the
/// agreement between ranks. OptionList declares options.
struct Option {
  std::string name;      ///< without dashes; the spelling with `_` is accepted, too
  std::string old_name;  ///< an accepted but undocumented former name; may be empty
  ValueKind kind = ValueKind::kText;
  std::string value_name;  ///< N, FILE, …; empty for a flag
  std::string initial;     ///< the default in canonical form; empty if none or not a fixed value
  Scope scope = Scope::kJob;
  std::string group;
  std::string help;
  std::string details;  ///< further text for the man page only
  double min = 0;
  double max = 0;
  bool above_min = false;  ///< `min` itself is not allowed
  bool below_max = false;  ///< `max` itself is not allowed
  /// All values of a kChoice; for a text, values that shell completion offers; for a number, words
  /// that are accepted besides numbers, such as on and off.
  std::vector<std::string> choices;
  char short_name = 0;
  /// The required type of a path, which is checked before any rank starts.
  enum class Path { kAny, kFile, kFiles, kFolder };
  Path path = Path::kAny;
  std::string path_word;         ///< a value that means generated data instead of a path
  std::string needs;             ///< another option, without which this option is refused
  bool is_required = false;      ///< has no default: the user or the checkpoint sets it
  bool may_change = false;       ///< may differ from the checkpoint that a job resumes from
  bool of_predict = false;       ///< may be given to `predict`, instead of the checkpoint's value
  bool of_training = false;      ///< refused by `predict`, because it concerns only the training
  bool step_limit = false;       ///< not taken from a checkpoint that has reached the limit
  bool random_only = false;      ///< has no effect if `--data` names a path
  bool data_only = false;        ///< has no effect unless `--data` names a path
  bool may_be_empty = false;     ///< the user may replace the default of a text by ""
  bool is_duration = false;      ///< a kReal that also accepts units of time: "50ms"
  bool each_own = false;         ///< each rank has its own default unless rank 0's user sets it
  std::string initial_in_words;  ///< the text that the help shows instead of `initial`
};
/// Returns true if `value` is a path: it is neither empty nor the option's `path_word`.
inline bool is_path(const Option& option, const std::string& value) {
  return !value.empty() && value != option.path_word;
}
using OptionTable = std::vector<Option>;

/// Returns the option with this name or old name; null if there is none.
const Option* find_option(const OptionTable& table, std::string_view name);

/// Returns `text` in canonical form ("5e-2" → "0.05"), in which ranks compare and send values.
/// Throws `invalid` if the option does not accept `text`. `where` names its source, as in "--lr".
std::string canonical_value(const Option& option, std::string_view text, std::string_view where);

/// Describes the values that the option accepts: "a whole number from 1 to 64", "FILE".
std::string allowed_values(const Option& option);

/// Returns true if the option applies to the whole job. `start` lines show these options.
inline bool is_job_option(const Option& option) {
  return option.scope == Scope::kJob || option.scope == Scope::kInput;
}

/// Returns the option's name in JSON lines: "batch_size".
std::string json_name(const Option& option);

/// Returns a canonical value as JSON: numbers as numbers, an empty text as null.
Json json_value(const Option& option, const std::string& canonical);

/// The values of all options: given by the user, taken from a checkpoint, or the defaults.
class ParsedOptions {
 public:
  explicit ParsedOptions(const OptionTable& table) : table_(&table) {}

  /// Returns the values that the user set.
  const OptionMap& values() const { return values_; }
  /// Returns true if the user set the option, for a flag only if not to its default.
  bool given(std::string_view name) const {
    const auto it = values_.find(std::string(name));
    if (it == values_.end()) return false;
    const Option* const option = find_option(*table_, name);
    return !option || option->kind != ValueKind::kFlag || it->second != option->initial;
  }
  bool flag(std::string_view name) const { return text(name) == "true"; }
  std::string text(std::string_view name) const {
    for (const OptionMap* values : {&values_, &derived_}) {
      if (const auto it = values->find(std::string(name)); it != values->end()) return it->second;
    }
    const Option* option = find_option(*table_, name);
    return option ? option->initial : std::string();
  }
  int64_t integer(std::string_view name) const {
    return base::number<int64_t>(text(name)).value_or(0);
  }
  double real(std::string_view name) const { return base::number<double>(text(name)).value_or(0); }

  /// Sets an option's value, which counts as given. `value` must be in canonical form.
  void set(const std::string& name, std::string value, std::string origin = "command line") {
    values_[name] = std::move(value);
    origins_[name] = std::move(origin);
  }
  /// Sets a default that depends on other options; the option still counts as not given.
  void derive(const std::string& name, std::string value, std::string origin = "derived") {
    derived_[name] = std::move(value);
    if (!values_.contains(name)) origins_[name] = std::move(origin);
  }
  /// Sets a value from a checkpoint: decided() is then true, but given() is not.
  void take(const std::string& name, std::string value, std::string origin = "checkpoint") {
    derive(name, std::move(value), std::move(origin));
    taken_.insert(name);
  }
  /// Returns where the value comes from, such as "default"; see the field `origins` in events.cpp.
  std::string origin(const std::string& name) const {
    const auto it = origins_.find(name);
    return it == origins_.end() ? "default" : it->second;
  }
  /// Returns true if the option was given or taken from a checkpoint.
  bool decided(const std::string& name) const { return given(name) || taken_.contains(name); }
  const OptionTable& table() const { return *table_; }
  /// Returns a copy with rank 0's values for all kJob options and for those kInput options that
  /// were not given to this rank. Throws `invalid` if a value of rank 0 is not allowed.
  ParsedOptions adopting(const OptionMap& of_rank_0) const;

 private:
  const OptionTable* table_;
  OptionMap values_;
  OptionMap derived_;
  OptionMap origins_;
  std::set<std::string> taken_;
};

namespace detail {

// These functions convert between an option's canonical text and a member of an options structure.
// For a bool, `first` is the text of true and `second` the text of false. For an optional, `first`
// is the text of an empty optional, and `second`, if not empty, the text of 0. The text of an empty
// list is empty.

template <class T>
void read_value(const std::string& text, T& value, const std::string& first = {},
                const std::string& second = {}) {
  if constexpr (std::is_same_v<T, bool>) {
    value = text == first;
  } else if constexpr (std::is_arithmetic_v<T>) {
    value = base::number<T>(text).value_or(0);
  } else if constexpr (std::is_same_v<T, std::string>) {
    value = text;
  } else if constexpr (requires { value.reset(); }) {
    value.reset();
    if (!text.empty() && text != first) read_value(text == second ? "0" : text, value.emplace());
  } else {
    value.clear();
    for (const auto part : base::split(text, ',')) {
      if (!text.empty()) read_value(std::string(part), value.emplace_back());
    }
  }
}

template <class T>
std::string write_value(const T& value, const std::string& first = {},
                        const std::string& second = {}) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? first : second;
  } else if constexpr (std::is_floating_point_v<T>) {
    return base::shortest(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return std::to_string(value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    return value;
  } else if constexpr (requires { value.has_value(); }) {
    const std::string text = value ? write_value(*value) : first;
    return text == "0" && !second.empty() ? second : text;
  } else {
    std::string text;
    for (size_t i = 0; i < value.size(); ++i) text += (i == 0 ? "" : ",") + write_value(value[i]);
    return text;
  }
}

}  // namespace detail

inline constexpr double kMaxInt = 2147483647.0;

/// Sets further fields of a declared Option. Each function returns *this, for chaining.
class OptionRow {
 public:
  explicit OptionRow(Option& option) : option_(option) {}

  OptionRow& range(double min, double max) { return set(option_.min, min).set(option_.max, max); }
  /// Allows values above `min`, up to `max`.
  OptionRow& above(double min, double max = kMaxInt) {
    return set(option_.above_min, true).range(min, max);
  }
  /// Allows values from `min` to below `max`.
  OptionRow& below(double min, double max) { return set(option_.below_max, true).range(min, max); }
  /// Sets the text that the help shows as the default, if the default is not a single value.
  OptionRow& by_default(const std::string& words) { return set(option_.initial_in_words, words); }
  OptionRow& formerly(const std::string& old_name) { return set(option_.old_name, old_name); }
  OptionRow& needs(const std::string& other) { return set(option_.needs, other); }
  /// Requires a value on rank 0, from the user or from the checkpoint that the job resumes from.
  OptionRow& required() { return set(option_.is_required, true); }
  OptionRow& random_only() { return set(option_.random_only, true); }
  OptionRow& data_only() { return set(option_.data_only, true); }
  OptionRow& each_own() { return set(option_.each_own, true); }
  OptionRow& may_be_empty() { return set(option_.may_be_empty, true); }
  OptionRow& may_change() { return set(option_.may_change, true); }
  OptionRow& of_predict() { return set(option_.of_predict, true).may_change(); }
  /// Also accepts `word` instead of a path. `./WORD` still means a file with that name.
  OptionRow& or_word(const std::string& word) {
    set(option_.path_word, word).value_name(option_.value_name + '|' + word);
    return offers({word});
  }
  OptionRow& of_training() { return set(option_.of_training, true); }
  /// Marks the option as the job's limit of steps (0: no limit). If a checkpoint has reached its
  /// limit, a job that resumes from it does not inherit the limit.
  OptionRow& step_limit() { return set(option_.step_limit, true).may_change(); }
  /// Makes the option apply only to the process that it is given to.
  OptionRow& of_this_rank() { return set(option_.scope, Scope::kRank); }
  OptionRow& value_name(const std::string& name) { return set(option_.value_name, name); }
  /// Replaces the help of an inherited option.
  OptionRow& help(const std::string& text) { return set(option_.help, text); }
  OptionRow& details(const std::string& text) {
    const std::string before = option_.details.empty() ? "" : option_.details + '\n';
    return set(option_.details, before + text);
  }
  /// Sets the values that shell completion offers.
  OptionRow& offers(const std::vector<std::string>& values) { return set(option_.choices, values); }

 private:
  template <class T>
  OptionRow& set(T& what, T value) {
    what = std::move(value);
    return *this;
  }

  Option& option_;
};

/// The options of a job. One declaration serves the parser, help, man page, completion, `config` in
/// the `start` line and the agreement between ranks:
///
///   list.integer("dim", &Options::dim, "numbers in a row").range(1, 4096);
///
/// The default is the member's value in a default-constructed Options. Other ranks inherit rank 0's
/// values, but may be given paths of their own.
template <class Options>
class OptionList {
 public:
  /// Sets the help heading of the options declared next.
  void group(std::string name) { group_ = std::move(name); }

  // `member` is a pointer to a member of Options or of its base, or a function that returns a
  // reference into an Options. If the member is a std::optional, empty means no value.

  /// Declares a whole number, at least 0 unless a range is set.
  OptionRow integer(std::string name, auto member, std::string help) {
    return add(std::move(name), ValueKind::kInteger, "N", member, std::move(help));
  }
  /// Declares a std::optional<int>: a whole number, or `word`, which means an empty optional.
  OptionRow integer_or(std::string name, auto member, const std::string& word, std::string help) {
    return add(std::move(name), ValueKind::kInteger, "N|" + word, member, std::move(help), word)
        .offers({word});
  }
  /// Declares a list of one or more whole numbers, separated by commas.
  OptionRow integers(std::string name, auto member, std::string help) {
    return add(std::move(name), ValueKind::kIntegers, "N[,...]", member, std::move(help));
  }
  /// Declares a finite number, at least 0 unless a range is set.
  OptionRow real(std::string name, auto member, std::string help) {
    return add(std::move(name), ValueKind::kReal, "X", member, std::move(help)).range(0, 1e6);
  }
  /// Declares a time in seconds, at least 0 unless a range is set. The user may write 50ms or 5m.
  OptionRow duration(std::string name, auto member, std::string help) {
    OptionRow row = real(std::move(name), member, std::move(help)).value_name("TIME");
    rows_.back().option.is_duration = true;
    return row;
  }
  /// Declares a std::string, or a vector of strings that are separated by commas.
  OptionRow text(std::string name, auto member, const std::string& value_name, std::string help) {
    return add(std::move(name), ValueKind::kText, value_name, member, std::move(help));
  }
  /// Declares the path of an input file, which may differ between ranks and must exist.
  OptionRow file(std::string name, auto member, std::string help) {
    return path(std::move(name), member, "FILE", std::move(help), Option::Path::kFile);
  }
  /// Declares one or more input files, as data::expand_paths() accepts them. The option may be
  /// repeated, or have several values; its value is then a list with commas.
  OptionRow files(std::string name, auto member, std::string help) {
    return path(std::move(name), member, "FILE[,...]", std::move(help), Option::Path::kFiles);
  }
  /// Declares the path of an input folder, with the same rules as file().
  OptionRow folder(std::string name, auto member, std::string help) {
    return path(std::move(name), member, "DIR", std::move(help), Option::Path::kFolder);
  }
  OptionRow choice(std::string name, auto member, const std::vector<std::string>& choices,
                   std::string help) {
    return add(std::move(name), ValueKind::kChoice, "NAME", member, std::move(help))
        .offers(choices);
  }
  /// Declares a std::optional<double>: a number, `off` (0), or `on` (empty: the job's own default).
  OptionRow on_off_or_real(std::string name, auto member, std::string help) {
    return add(std::move(name), ValueKind::kReal, "on|off|X", member, std::move(help), "on", "off")
        .offers({"on", "off"})
        .range(0, 1e6);
  }
  OptionRow flag(std::string name, auto member, std::string help) {
    return add(std::move(name), ValueKind::kFlag, "", member, std::move(help), "true", "false");
  }

  OptionRow row(std::string_view name) { return OptionRow(find(name)); }
  /// Returns a declared option, so that it can be changed. Throws `internal` if `name` is unknown.
  Option& find(std::string_view name) {
    for (Row& row : rows_) {
      if (row.option.name == name) return row.option;
    }
    throw base::Exception(base::ErrorKind::kInternal, "no option is named " + std::string(name));
  }

  /// Removes an option that the job inherits from a structure in options.h.
  void without(std::string_view name) {
    std::erase_if(rows_, [name](const Row& row) { return row.option.name == name; });
  }

  /// Returns the name of the option that sets `member`; empty if no option does.
  std::string name_of(int Options::*member) const {
    for (const Row& row : rows_) {
      if (row.whole == member) return row.option.name;
    }
    return {};
  }

  OptionTable table() const {
    OptionTable table;
    for (const Row& row : rows_) table.push_back(row.option);
    return table;
  }
  /// Returns an Options with the values of `parsed`.
  Options read(const ParsedOptions& parsed) const {
    Options options;
    for (const Row& row : rows_) row.read(options, parsed.text(row.option.name));
    return options;
  }
  /// Returns the values of `options` in canonical form.
  OptionMap write(const Options& options) const {
    OptionMap values;
    for (const Row& row : rows_) values[row.option.name] = row.write(options);
    return values;
  }

 private:
  struct Row {
    Option option;
    std::function<void(Options&, const std::string&)> read;
    std::function<std::string(const Options&)> write;
    int Options::*whole = nullptr;  // for name_of(): the member, if it is an int
  };

  OptionRow add(std::string name, ValueKind kind, std::string value_name, auto member,
                std::string help, auto... words) {
    Row row;
    row.read = [member, words...](Options& options, const std::string& text) {
      detail::read_value(text, std::invoke(member, options), words...);
    };
    row.write = [member, words...](const Options& options) {
      return detail::write_value(std::invoke(member, options), words...);
    };
    if constexpr (std::is_convertible_v<decltype(member), int Options::*>) row.whole = member;
    row.option.name = std::move(name);
    row.option.kind = kind;
    row.option.value_name = std::move(value_name);
    row.option.max = kMaxInt;
    row.option.group = group_;
    row.option.help = std::move(help);
    row.option.initial = row.write(Options());
    rows_.push_back(std::move(row));
    return OptionRow(rows_.back().option);
  }
  OptionRow path(std::string name, auto member, const char* what, std::string help,
                 Option::Path kind) {
    OptionRow row = add(std::move(name), ValueKind::kText, what, member, std::move(help));
    rows_.back().option.scope = Scope::kInput;
    rows_.back().option.path = kind;
    return row.may_change();  // not the path, but the file's content must match the checkpoint
  }

  std::string group_ = "Job";
  std::vector<Row> rows_;
};

}  // namespace distrain::job
