#pragma once

#include <string>
#include <vector>

#include "distrain/job/checkpoints.h"
#include "distrain/job/definition.h"
#include "placement.h"
#include "program.h"

namespace distrain::app {

using job::Json;
using job::Option;
using job::OptionMap;
using job::OptionTable;
using job::ParsedOptions;
using job::Scope;
using job::ValueKind;

/// Returns the job's own options and those of all jobs (ranks, network, run), sorted by group. Sets
/// `mistake` of `job` if two options have the same name or a name is not valid.
OptionTable whole_table(job::JobInfo& job);

/// Parses `args`, without the names of program and command. Stores one argument that is not an
/// option in `operand`, unless it is null. Throws `invalid`; the message about an unknown option
/// refers to the help and the other jobs of `program`, unless it is null.
ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args,
                            std::string* operand = nullptr, const Program* program = nullptr);

/// Returns the default as help and man page show it; empty if they show none.
inline std::string default_in_words(const Option& option) {
  if (option.kind == ValueKind::kFlag || option.is_required) return {};
  return option.initial_in_words.empty() ? option.initial : option.initial_in_words;
}
/// Sets the options that are not given to their values in the checkpoint of `--resume`, if it
/// exists yet. Returns in words the given options that differ. Throws `bad_data` if these may not
/// change.
std::string take_resumed_options(ParsedOptions& options, const std::string& cmd);
/// Sets the options that define the model to their values in `saved`. Throws `invalid` if an option
/// is given that `predict` does not use, and `bad_data` if a given value differs.
void take_model_options(ParsedOptions& options, const job::Snapshot& saved);

/// Returns the token from --token-file or, with a warning, from DISTRAIN_TOKEN, which is removed
/// from the environment; empty if neither is set. Throws `auth` if other users may read or change
/// the file, and `invalid` if there is no valid token in it.
std::string take_token(const ParsedOptions& options, Placement& placement);

/// Checks required options, dependencies and paths before any rank starts. Throws `invalid` or
/// `bad_data`; warns about options without effect.
void check_options(const ParsedOptions& options, Placement& placement);

/// Throws `invalid` if `--inject KIND=VALUE[@rank=N][,...]` is malformed or impossible. Warns in
/// `placement` of faults without effect. `has_stages`: ranks from 1 on are pipeline stages.
void check_injections(const ParsedOptions& options, bool has_stages, Placement& placement);
/// Returns the faults for `rank`. If a kind is given twice, the last one applies.
job::Injection injection_of(const ParsedOptions& options, int rank);

}  // namespace distrain::app
