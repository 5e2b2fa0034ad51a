#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "distrain/app/options.h"

namespace distrain::app {

// What the option tables of the subcommands are made of.

inline constexpr double kMaxInt = 2147483647.0;

Option integer(std::string name, std::string initial, double min, double max, std::string help);
/// One or more, with commas between.
Option integers(std::string name, std::string initial, double min, double max, std::string help);
Option real(std::string name, std::string initial, double min, double max, std::string help);
/// Above 0.
Option seconds(std::string name, std::string initial, std::string help);
Option text(std::string name, std::string value_name, std::string help);
/// The first one is the default.
Option choice(std::string name, std::vector<std::string> choices, std::string help);
Option flag(std::string name, std::string help);

/// The option with a change that the functions above have no argument for.
Option but(Option option, void (*change)(Option&));
/// Shown as the default in place of the value, which may be none.
Option by_default(Option option, std::string words);
Option each_own(Option option);
Option random_only(Option option);
Option data_only(Option option);

// Rows that several training jobs have.
Option epochs_option(std::string initial);
Option steps_option();
Option seed_option(const std::string& of = "of parameters, data and shuffling");
/// An epoch's length on random data.
Option random_batches_option(std::string initial);
/// Of the updates of several trainers.
Option mode_option();
/// `each` is what has a line, and `none` what 0 means.
Option log_interval_option(std::string initial, const std::string& each = "step",
                           const std::string& none = "once an epoch");

/// Adds `more` to `table` under `group`.
void append(OptionTable& table, std::string group, Scope scope, OptionTable more);
/// `--checkpoint` and what goes with it.
/// `each` is what is counted, in the plural, and `by_itself` when there is a save with
/// `--checkpoint-every` at 0.
void append_checkpoints(OptionTable& table, const std::string& each = "steps",
                        const std::string& by_itself = "each epoch's end",
                        const std::string& every = "0");
/// Changes an option that is in the table.
void change(OptionTable& table, std::string_view name, void (*how)(Option&));
/// Adds what the man page says of options of the table: name, sentences.
void describe(OptionTable& table,
              const std::vector<std::pair<std::string_view, std::string_view>>& details);
/// What every scenario has.
void append_common(OptionTable& table);

}  // namespace distrain::app
