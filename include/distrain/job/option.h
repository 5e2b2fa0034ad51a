#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "distrain/base/text.h"
#include "distrain/job/job.h"

namespace distrain::job {

enum class ValueKind { kFlag, kInteger, kIntegers, kReal, kText, kChoice };

/// Which processes an option applies to.
enum class Scope {
  kJob,        ///< all ranks have rank 0's value; another rank may only be given the same value
  kInput,      ///< as kJob, but another rank may be given a value of its own (a path)
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
  std::string initial;     ///< the default in canonical form; empty if it is none or depends
  Scope scope = Scope::kJob;
  std::string group;
  std::string help;
  std::string details;  ///< further text for the man page only
  double min = 0;
  double max = 0;
  bool above_min = false;  ///< `min` itself is not allowed
  bool below_max = false;  ///< `max` itself is not allowed
  /// All values of a kChoice, values of a text that a shell completes, or words that a number
  /// option accepts, such as on and off.
  std::vector<std::string> choices;
  char short_name = 0;
  /// The required type of a path, which is checked before any rank starts.
  enum class Path { kAny, kFile, kFolder };
  Path path = Path::kAny;
  std::string path_word;         ///< a value that is no path but means data that the job generates
  std::string needs;             ///< another option, without which this option is refused
  bool is_required = false;      ///< has no default: the user or the checkpoint sets it
  bool may_change = false;       ///< may differ from the checkpoint that a job resumes from
  bool of_predict = false;       ///< applies to `predict` although it may change
  bool of_training = false;      ///< does not apply to `predict` although it may not change
  bool step_limit = false;       ///< not taken from a checkpoint that has reached the limit
  bool hidden = false;           ///< for tests; undocumented
  bool random_only = false;      ///< has no effect if `--data` names a path
  bool data_only = false;        ///< has no effect unless `--data` names a path
  bool may_be_empty = false;     ///< the user may replace the default of a text by ""
  bool each_own = false;         ///< each rank has its own default unless rank 0's user sets it
  std::string initial_in_words;  ///< shown instead of `initial`
};
/// Returns true if `value` of a path option names a path.
inline bool is_path(const Option& option, const std::string& value) {
  return !value.empty() && value != option.path_word;
}
using OptionTable = std::vector<Option>;

/// Returns the option with this name or old name; null if there is none.
const Option* find_option(const OptionTable& table, std::string_view name);

/// Returns the form of a value that is compared and sent ("5e-2" → "0.05"). Throws `invalid`, with
/// `where` (an option or environment variable) in the message, if the option does not accept it.
std::string canonical_value(const Option& option, std::string_view text, std::string_view where);

/// Describes the values that the option accepts: "a whole number from 1 to 64", "FILE".
std::string allowed_values(const Option& option);

/// Returns true for options of the job, which `start` lines show.
inline bool is_job_option(const Option& option) {
  return option.scope == Scope::kJob || option.scope == Scope::kInput;
}

/// Returns the option's name in JSON lines: "batch_size".
std::string json_name(const Option& option);

/// Returns a canonical value as JSON: numbers as numbers, an empty text as null.
Json json_value(const Option& option, const std::string& canonical);

/// The values of the options: those that the user gave, otherwise the defaults of the table.
class ParsedOptions {
 public:
  explicit ParsedOptions(const OptionTable& table) : table_(&table) {}

  bool given(std::string_view name) const { return values_.contains(std::string(name)); }
  bool flag(std::string_view name) const { return text(name) == "true"; }
  std::string text(std::string_view name) const;
  int64_t integer(std::string_view name) const;
  double real(std::string_view name) const;

  /// `value` must be canonical.
  void set(const std::string& name, std::string value) { values_[name] = std::move(value); }
  /// Sets a default that depends on other options; the option still counts as not given.
  void derive(const std::string& name, std::string value) { derived_[name] = std::move(value); }
  /// Sets a value from a checkpoint: the option counts as not given but as decided().
  void take(const std::string& name, std::string value) {
    derive(name, std::move(value));
    taken_.insert(name);
  }
  /// Returns true if the option was given or taken from a checkpoint.
  bool decided(const std::string& name) const { return given(name) || taken_.contains(name); }
  const OptionTable& table() const { return *table_; }
  /// Returns these options with rank 0's values for kJob options, and for kInput options that were
  /// not given here. Throws `invalid` if rank 0's value is not allowed.
  ParsedOptions adopting(const OptionMap& of_rank_0) const;

 private:
  const OptionTable* table_;
  OptionMap values_;
  OptionMap derived_;
  std::set<std::string> taken_;
};

namespace detail {

// These functions convert between canonical values and members of an options structure. `first` and
// `second` are the words for true and false of a bool, or for no value and 0 of an optional.
// Without these words an optional without a value is an empty text, as is an empty list.

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

}  // namespace distrain::job
