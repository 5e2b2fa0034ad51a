#pragma once

#include <string>

#include "distrain/app/options.h"
#include "distrain/job/checkpoints.h"

namespace distrain::app {

/// A value that a checkpoint says, as options are compared; empty: an optional that was not there.
/// Throws `bad_data` for one that is not the option's.
std::string canonical(const Option& option, const std::string& text, const job::Snapshot& saved);

enum class Take { kAll, kWhatMustAgree };

/// Takes from a checkpoint the options that the user did not give. Gives back in words which of
/// those that were given are others now. Throws `bad_data` for one that has to be the same.
std::string take_options(ParsedOptions& options, const job::Snapshot& saved, Take take);

/// The same for a job that goes on from the checkpoint of `--resume`, if there is one yet.
std::string take_resumed_options(ParsedOptions& options, const std::string& cmd);

}  // namespace distrain::app
