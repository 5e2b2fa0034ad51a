#pragma once

#include <functional>
#include <string>
#include <vector>

#include "distrain/base/trace.h"

namespace distrain::job {

/// Throws unless `path` can be written or replaced: `invalid` if it is not a regular file,
/// otherwise `resources` with the reason. Creates and removes a file beside it to find out.
void check_trace_path(const std::string& path);

/// Writes the events of all ranks, with times on one clock, in the Trace Event Format (JSON object
/// form, one event per line), which ui.perfetto.dev and chrome://tracing open.
///
/// Each rank is a process and each track a thread with a number unique in the file; times are in us
/// since the first event. A flow is omitted unless both ends are recorded in order. The file
/// appears complete: it is written beside `path`, or beside the target of a link, and renamed.
/// Throws as check_trace_path(). For tests, `before_system_call` is called before each system call.
void write_trace(const std::string& path, const std::vector<base::RankTrace>& ranks,
                 const std::function<void(const char* name)>& before_system_call = {});

}  // namespace distrain::job
