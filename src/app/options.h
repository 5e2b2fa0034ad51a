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

/// Returns the job's options and those of every job (ranks, network, run) by group, the job's own
/// first. Sets the job's mistake if two options have the same name or a name is not valid.
OptionTable whole_table(job::JobInfo& job);

/// Throws `invalid` for whatever is wrong with `args` (without program and command name). One
/// argument that is no option goes to `operand`, unless `operand` is null. The message about an
/// unknown option names the help and the other jobs of `program`, unless `program` is null.
ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args,
                            std::string* operand = nullptr, const Program* program = nullptr);

/// Returns what help and man page show as the default; empty if there is nothing to show.
inline std::string default_in_words(const Option& option) {
  if (option.kind == ValueKind::kFlag || option.is_required) return {};
  return option.initial_in_words.empty() ? option.initial : option.initial_in_words;
}
/// Takes the options that the user did not give from the checkpoint of `--resume`, if there is one
/// yet. Returns in words which given ones differ. Throws `bad_data` for one that must not.
std::string take_resumed_options(ParsedOptions& options, const std::string& cmd);
/// The same for `predict`, of those that the model depends on. Throws `invalid` for others given.
void take_model_options(ParsedOptions& options, const job::Snapshot& saved);

/// The job's token: of --token-file, or else of DISTRAIN_TOKEN, which it takes out of the
/// environment and warns of; empty if there is none. Throws `auth` for a file that others can read,
/// `invalid` for one that holds no token.
std::string take_token(const ParsedOptions& options, Placement& placement);

/// Checks before any rank starts: options that need others, paths; warns of options without effect.
void check_options(const ParsedOptions& options, Placement& placement);

}  // namespace distrain::app
