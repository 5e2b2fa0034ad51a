#pragma once

#include <string>

#include "distrain/app/options.h"
#include "distrain/app/placement.h"

namespace distrain::app {

// Checks that several subcommands have, for what can be known before any rank starts.

/// Throws `bad_data` unless the option's path, if there is one, can be read: a file with something
/// in it.
void check_file(const ParsedOptions& options, const char* name);
/// The same for a folder.
void check_folder(const ParsedOptions& options, const char* name);

/// Throws `invalid` if `name` is given without `needed`.
void check_needs(const ParsedOptions& options, const char* name, const char* needed);

/// `--checkpoint` and what goes with it; rank 0 alone reads and writes there.
void check_checkpoint(const ParsedOptions& options, const Placement& placement);

/// `--trace`: rank 0 alone writes there.
void check_trace(const ParsedOptions& options, const Placement& placement);

}  // namespace distrain::app
