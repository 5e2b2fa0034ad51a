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

/// Who an option belongs to.
enum class Scope {
  kJob,        ///< rank 0's holds for all ranks; given elsewhere it must be the same
  kInput,      ///< as kJob, but a rank may be given its own (a path)
  kRank,       ///< of this process alone
  kPlacement,  ///< which ranks run where
  kInfo,       ///< prints something and ends
};

/// One option: what the parser, the help text, man pages, completions, the schema of `start` lines
/// and the agreement between ranks have to know of it. See OptionList for how to declare one.
struct Option {
  std::string name;      ///< without dashes; the spelling with `_` comes by itself
  std::string old_name;  ///< goes on to be accepted, and is in no text; may be empty
  ValueKind kind = ValueKind::kText;
  std::string value_name;  ///< N, FILE, …; empty for a flag
  std::string initial;     ///< the default in canonical form, empty: none or it depends
  Scope scope = Scope::kJob;
  std::string group;
  std::string help;
  std::string details;  ///< what the man page alone says besides
  double min = 0;
  double max = 0;
  bool above_min = false;  ///< `min` itself is not allowed
  bool below_max = false;  ///< nor is `max`
  /// All of a kChoice; some of a text, for a shell; words in place of a number: on and off.
  std::vector<std::string> choices;
  char short_name = 0;
  /// What a path must lead to, which is seen before any rank starts.
  enum class Path { kAny, kFile, kFolder };
  Path path = Path::kAny;
  std::string path_word;         ///< a value that names no path: data that the job makes itself
  std::string needs;             ///< another option, without which it makes no sense
  bool is_required = false;      ///< it has no default: the user or the checkpoint sets it
  bool may_change = false;       ///< a job may go on from a checkpoint with another value
  bool of_predict = false;       ///< `predict` heeds it, though it may change; in predict's help
  bool of_training = false;      ///< `predict` has no use for it, though it may not change
  bool step_limit = false;       ///< a job that has reached it goes on without it
  bool hidden = false;           ///< for tests; in no text
  bool random_only = false;      ///< without effect where `--data` is given
  bool data_only = false;        ///< without effect where it is not
  bool may_be_empty = false;     ///< a text whose default the user may switch off by ""
  bool each_own = false;         ///< unless rank 0's user gives it, each rank has its own default
  std::string initial_in_words;  ///< shown instead of `initial`
};
/// Whether `value` of a path option names a path.
inline bool is_path(const Option& option, const std::string& value) {
  return !value.empty() && value != option.path_word;
}
using OptionTable = std::vector<Option>;

/// By its name or its old one.
const Option* find_option(const OptionTable& table, std::string_view name);

/// The value as it is compared and sent ("5e-2" → "0.05"). Throws `invalid` naming `where` (the
/// option or environment variable) when it is not one of the option's.
std::string canonical_value(const Option& option, std::string_view text, std::string_view where);

/// Describes the values that the option accepts: "a whole number from 1 to 64", "FILE".
std::string allowed_values(const Option& option);

/// Whether it is one of the job's, which `start` lines show.
inline bool is_job_option(const Option& option) {
  return option.scope == Scope::kJob || option.scope == Scope::kInput;
}

/// The option's name as JSON lines have it: "batch_size".
std::string json_name(const Option& option);

/// An option's canonical value as JSON: a number stays one, an empty text becomes null.
Json json_value(const Option& option, const std::string& canonical);

/// What the user gave, validated, over the defaults of the table.
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
  /// As set(), for a value that follows from others: the option still counts as not given.
  void derive(const std::string& name, std::string value) { derived_[name] = std::move(value); }
  /// The same, for one that a checkpoint says: no default is to follow from others.
  void take(const std::string& name, std::string value) {
    derive(name, std::move(value));
    taken_.insert(name);
  }
  /// Given, or taken.
  bool decided(const std::string& name) const { return given(name) || taken_.contains(name); }
  const OptionTable& table() const { return *table_; }
  /// Rank 0's over these, but for kRank options, and kInput ones given here. Throws `invalid`.
  ParsedOptions adopting(const OptionMap& of_rank_0) const;

 private:
  const OptionTable* table_;
  OptionMap values_;
  OptionMap derived_;
  std::set<std::string> taken_;
};

namespace detail {

// A member of an options structure from a canonical value, and back. `first` and `second` are the
// words for true and false of a bool, and for no value and 0 of an optional; otherwise an optional
// without a value, and a list of nothing, are empty texts.

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
