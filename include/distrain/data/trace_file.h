#pragma once

#include <string>
#include <vector>

#include "distrain/base/trace.h"

namespace distrain::data {

/// Throws unless a file of this name can be written, without leaving anything there: `invalid` for
/// what is not a plain file, `resources` with the system's reason for a folder that cannot be used.
void check_trace_path(const std::string& path);

/// Writes the ranks' events, whose times are on one clock, in the Trace Event Format (JSON object
/// form, an event a line), which ui.perfetto.dev and chrome://tracing open.
///
/// A rank is a process, a track a thread, with numbers that are unique in the file; times are in us
/// from the first event on. A flow is left out unless both its ends are there, in order. The file
/// appears at the end, whole. Throws `resources`.
void write_trace(const std::string& path, const std::vector<base::RankTrace>& ranks);

}  // namespace distrain::data
