#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "distrain/job/option.h"

namespace distrain::job {

inline constexpr double kMaxInt = 2147483647.0;

/// Sets further fields of a declared Option. Each function returns the row, for chaining.
class OptionRow {
 public:
  explicit OptionRow(Option& option) : option_(option) {}

  OptionRow& range(double min, double max) {
    option_.min = min;
    return set(option_.max, max);
  }
  /// Allows values above `min`, up to `max`.
  OptionRow& above(double min, double max = kMaxInt) {
    return set(option_.above_min, true).range(min, max);
  }
  /// Allows values from `min` to below `max`.
  OptionRow& below(double min, double max) { return set(option_.below_max, true).range(min, max); }
  /// Sets the text that the help shows as the default, if the default is not one value.
  OptionRow& by_default(const std::string& words) { return set(option_.initial_in_words, words); }
  OptionRow& formerly(const std::string& old_name) { return set(option_.old_name, old_name); }
  OptionRow& needs(const std::string& other) { return set(option_.needs, other); }
  /// Requires rank 0's user to give the option, unless the job resumes from a checkpoint with it.
  OptionRow& required() { return set(option_.is_required, true); }
  OptionRow& random_only() { return set(option_.random_only, true); }
  OptionRow& data_only() { return set(option_.data_only, true); }
  OptionRow& each_own() { return set(option_.each_own, true); }
  OptionRow& may_be_empty() { return set(option_.may_be_empty, true); }
  OptionRow& may_change() { return set(option_.may_change, true); }
  OptionRow& of_predict() { return set(option_.of_predict, true).may_change(); }
  /// Also accepts `word` instead of a path. ./WORD names a file that is called `word`.
  OptionRow& or_word(const std::string& word) {
    set(option_.path_word, word).value_name(option_.value_name + '|' + word);
    return offers({word});
  }
  OptionRow& of_training() { return set(option_.of_training, true); }
  /// Marks the option as the step that ends the run (0: none). A job that resumes from
  /// a checkpoint that has reached the limit does not inherit it.
  OptionRow& step_limit() { return set(option_.step_limit, true).may_change(); }
  /// Makes the option apply to this process only.
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
  // reference into an Options. An empty optional means no value.

  /// Declares a whole number, at least 0 unless a range is set.
  OptionRow integer(std::string name, auto member, std::string help) {
    OptionRow row = add(std::move(name), ValueKind::kInteger, member, std::move(help));
    return row.value_name("N").range(0, kMaxInt);
  }
  /// Declares a std::optional<int>: as integer(), or `word` for an empty optional.
  OptionRow integer_or(std::string name, auto member, const std::string& word, std::string help) {
    OptionRow row = add(std::move(name), ValueKind::kInteger, member, std::move(help), word);
    rows_.back().option.choices = {word};
    return row.value_name("N|" + word).range(0, kMaxInt);
  }
  /// Declares a list of one or more whole numbers, separated by commas.
  OptionRow integers(std::string name, auto member, std::string help) {
    OptionRow row = add(std::move(name), ValueKind::kIntegers, member, std::move(help));
    return row.value_name("N[,...]").range(0, kMaxInt);
  }
  /// Declares a finite number, at least 0 unless a range is set.
  OptionRow real(std::string name, auto member, std::string help) {
    OptionRow row = add(std::move(name), ValueKind::kReal, member, std::move(help));
    return row.value_name("X").range(0, 1e6);
  }
  /// Declares a std::string, or a vector of strings that are separated by commas.
  OptionRow text(std::string name, auto member, const std::string& value_name, std::string help) {
    return add(std::move(name), ValueKind::kText, member, std::move(help)).value_name(value_name);
  }
  /// Declares the path of an input file, which may differ between ranks and must exist.
  OptionRow file(std::string name, auto member, std::string help) {
    return path(std::move(name), member, "FILE", std::move(help), Option::Path::kFile);
  }
  /// Declares the path of an input folder, as file() does.
  OptionRow folder(std::string name, auto member, std::string help) {
    return path(std::move(name), member, "DIR", std::move(help), Option::Path::kFolder);
  }
  OptionRow choice(std::string name, auto member, std::vector<std::string> choices,
                   std::string help) {
    OptionRow row = add(std::move(name), ValueKind::kChoice, member, std::move(help));
    rows_.back().option.choices = std::move(choices);
    return row.value_name("NAME");
  }
  /// Declares a std::optional<double>: a number, `off` (0), or `on` (empty: the job's own default).
  OptionRow on_off_or_real(std::string name, auto member, std::string help) {
    OptionRow row = add(std::move(name), ValueKind::kReal, member, std::move(help), "on", "off");
    rows_.back().option.choices = {"on", "off"};
    return row.value_name("on|off|X").range(0, 1e6);
  }
  OptionRow flag(std::string name, auto member, std::string help) {
    return add(std::move(name), ValueKind::kFlag, member, std::move(help), "true", "false");
  }

  OptionRow row(std::string_view name) { return OptionRow(find(name)); }
  /// Returns a declared option, which may be changed. Throws `internal` if there is none.
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

  /// Returns the name of the option that sets `member`; empty if there is none.
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

  OptionRow add(std::string name, ValueKind kind, auto member, std::string help, auto... words) {
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
    row.option.group = group_;
    row.option.help = std::move(help);
    row.option.initial = row.write(Options());
    rows_.push_back(std::move(row));
    return OptionRow(rows_.back().option);
  }
  OptionRow path(std::string name, auto member, const char* what, std::string help,
                 Option::Path kind) {
    OptionRow row = add(std::move(name), ValueKind::kText, member, std::move(help));
    Option& option = rows_.back().option;
    option.scope = Scope::kInput;
    option.path = kind;
    option.may_change = true;  // only the content must agree with the checkpoint
    return row.value_name(what);
  }

  std::string group_ = "Job";
  std::vector<Row> rows_;
};

}  // namespace distrain::job
