#pragma once

#include <functional>
#include <string>
#include <vector>

#include "distrain/base/trace.h"

namespace distrain::data {

/// Throws unless a file of this name can be written, and one that is there replaced, without
/// leaving anything there: `invalid` for what is not a plain file, `resources` with the system's
/// reason for the rest. Makes and removes a file beside it to find out.
void check_trace_path(const std::string& path);

/// Writes the ranks' events, whose times are on one clock, in the Trace Event Format (JSON object
/// form, an event a line), which ui.perfetto.dev and chrome://tracing open.
///
/// A rank is a process, a track a thread, with numbers that are unique in the file; times are in us
/// from the first event on. A flow is left out unless both its ends are there, in order. The file
/// appears at the end, whole: it is written beside `path` and renamed. Where that is a link, what
/// it leads to is replaced, not the link. Throws as check_trace_path().
///
/// `before_system_call` is told before each system call, with its name: for the tests.
void write_trace(const std::string& path, const std::vector<base::RankTrace>& ranks,
                 const std::function<void(const char* name)>& before_system_call = {});

}  // namespace distrain::data
