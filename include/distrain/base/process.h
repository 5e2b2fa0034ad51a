#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <signal.h>
#include <sys/types.h>

namespace distrain::base {

std::string host_name();

/// The nearest process above this one whose name holds `part`; none if there is none.
std::optional<pid_t> ancestor(std::string_view part);

/// The largest resident set of this process so far, in MB.
double peak_rss_mb();

/// Threads of this process beside the caller's: a program may have had some before it called us.
std::vector<pid_t> other_threads();

sigset_t signal_set(std::initializer_list<int> numbers);

/// Blocks the signals in this thread and in those that there are: else they would come to one of
/// these, and end the process, where sigwait or a signalfd is to have them.
void block_in_all_threads(const sigset_t& set);

}  // namespace distrain::base
