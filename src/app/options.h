#pragma once

#include <string>
#include <vector>

#include "distrain/app/program.h"
#include "distrain/job/checkpoints.h"
#include "distrain/job/definition.h"
#include "placement.h"

namespace distrain::app {

using job::is_job_option;
using job::Json;
using job::json_name;
using job::Option;
using job::OptionMap;
using job::OptionTable;
using job::ParsedOptions;
using job::Scope;
using job::ValueKind;

/// Returns the job's own options and those of all jobs (ranks, network, run), sorted by group. Sets
/// `mistake` of `job` if two options have the same name or a name is not valid.
OptionTable whole_table(job::JobInfo& job);

/// Parses `args`, the arguments after the names of program and command. Stores one argument that is
/// not an option in `operand`, unless `operand` is null. Throws `invalid` if `args` are not valid;
/// unless `program` is null, the message about an unknown option refers to the help or to the jobs
/// of `program` that have the option.
ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args,
                            std::string* operand = nullptr, const Program* program = nullptr);

/// Returns the default as help and man page show it; empty if they show none.
inline std::string default_in_words(const Option& option) {
  if (option.kind == ValueKind::kFlag || option.is_required) return {};
  return option.initial_in_words.empty() ? option.initial : option.initial_in_words;
}
/// Sets the options that the user did not give to their values in the checkpoint of `--resume`, if
/// that checkpoint exists yet. Returns in words the given options whose values differ from the
/// checkpoint's. Throws `bad_data` if an option differs that may not change.
std::string take_resumed_options(ParsedOptions& options, const std::string& cmd);
/// Sets the options that define the model to their values in `saved`. Throws `invalid` if an option
/// is given that `predict` does not use, and `bad_data` if a given value differs.
void take_model_options(ParsedOptions& options, const job::Snapshot& saved);

/// Returns the job's token from --token-file, otherwise from DISTRAIN_TOKEN with a warning; empty
/// if neither is set. Removes DISTRAIN_TOKEN from the environment. Throws `auth` if the file
/// belongs to another user or other users may read or change it, and `invalid` if it holds no valid
/// token.
std::string take_token(const ParsedOptions& options, Placement& placement);

/// Checks, before any rank starts, the restart options, required options, options that need other
/// options, and paths. Warns about options without effect. Throws `invalid` or `bad_data`.
void check_options(const ParsedOptions& options, Placement& placement);

}  // namespace distrain::app
