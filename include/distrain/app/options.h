#pragma once

#include <string>
#include <vector>

#include "distrain/job/option.h"

namespace distrain::app {

using base::did_you_mean;
using job::find_option;
using job::is_job_option;
using job::Json;
using job::json_name;
using job::Option;
using job::OptionMap;
using job::OptionTable;
using job::ParsedOptions;
using job::Scope;
using job::ValueKind;

/// Throws `invalid` for whatever is wrong with `args` (without program and command name).
ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& args);

}  // namespace distrain::app
