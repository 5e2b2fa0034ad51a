#pragma once

#include <string>

#include "options.h"

namespace distrain::app {

/// The job's token: of --token-file, or else of DISTRAIN_TOKEN, which it takes out of the
/// environment and warns of; empty if there is none. Throws `auth` for a file that others can read,
/// `invalid` for one that holds no token.
std::string take_token(const ParsedOptions& options, Placement& placement);

}  // namespace distrain::app
