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

/// Returns the value of the environment variable `name`, or nothing if it is not set.
std::optional<std::string> variable(const char* name);

/// Returns the nearest ancestor process whose name contains `part`, if there is one.
std::optional<pid_t> ancestor(std::string_view part);

/// Returns the peak resident set size of this process in MiB.
double peak_rss_mb();

/// Returns the ids of this process's threads, except the calling thread.
std::vector<pid_t> other_threads();

sigset_t signal_set(std::initializer_list<int> numbers);

/// Blocks the signals in all existing threads. The kernel may deliver a signal to any thread that
/// does not block it, so such a thread would take it from sigwait() or a signalfd.
void block_in_all_threads(const sigset_t& set);

}  // namespace distrain::base
