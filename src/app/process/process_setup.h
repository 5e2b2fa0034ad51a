#pragma once

#include <signal.h>

#include "distrain/base/clock.h"
#include "distrain/base/process.h"

namespace distrain::app {

using base::host_name;
using base::peak_rss_mb;

/// Throws `invalid` if the working directory of this process had been deleted when it began.
void expect_working_directory();

/// When this process began, for wall_s and startup_s: loading LibTorch takes longer than the rest
/// of a small job's start, so it counts. To be called first in main.
base::TimePoint process_start();

/// Opens /dev/null as fd 0 and 2 where they are closed. False when stdout is closed.
bool secure_standard_fds();

/// Signals, allocators: what should hold before the first thread and the first big block.
void set_up_process();

/// The signals that end a job or a rank: SIGINT, SIGTERM, and SIGHUP unless nohup(1) ignores it;
/// and `more`.
sigset_t ending_signals(std::initializer_list<int> more = {});

/// The signal by which a job saves and goes on.
inline constexpr int kSaveSignal = SIGUSR1;

/// The signal by which a rank tells what it waits for, and goes on.
inline constexpr int kQuestionSignal = SIGQUIT;

/// Ends the process from any thread, whatever the others are at. What SIGINT has ended (130) dies
/// of SIGINT, as shells expect: a loop of theirs goes on after a mere exit status.
[[noreturn]] void leave_process(int exit_code);

/// Sets the number of LibTorch's intra-op threads and returns it. If `wanted` is 0, the number is
/// that of OMP_NUM_THREADS, or else a fair share of the CPUs among `ranks` that use them.
int set_up_threads(int wanted, int ranks);

}  // namespace distrain::app
