#pragma once

#include <signal.h>

#include "distrain/base/clock.h"
#include "distrain/base/process.h"

namespace distrain::app {

using base::host_name;
using base::peak_rss_mb;

/// Throws `invalid` if the working directory had been deleted when this process started.
void expect_working_directory();
/// Returns the time when this process began to load its libraries. Jobs measure their startup from
/// this time, because loading takes most of a small job's startup. Call it first in main().
base::TimePoint process_start();
/// Opens /dev/null in place of closed descriptors among 0, 1 and 2. Returns false if 1 was closed.
bool secure_standard_fds();
/// Sets signal actions, resource limits and allocator options. Call it before any thread starts.
void set_up_process();

/// Returns `more` and the signals that end a job: SIGINT, SIGTERM and, unless ignored, SIGHUP.
sigset_t ending_signals(std::initializer_list<int> more = {});

inline constexpr int kSaveSignal = SIGUSR1;      ///< makes a job save and continue
inline constexpr int kQuestionSignal = SIGQUIT;  ///< makes a rank print its waits and continue

/// Ends the process at once; callable on any thread. If `exit_code` is 130, raises SIGINT instead
/// of exiting, because a shell loop stops only if SIGINT killed its command.
[[noreturn]] void leave_process(int exit_code);

/// Sets the number of LibTorch's intra-op threads and returns it. If `wanted` is 0, the number is
/// OMP_NUM_THREADS or, if unset, the CPUs divided by `ranks`. Throws if a thread cannot be started.
int set_up_threads(int wanted, int ranks);

/// Makes large CPU tensors of this process reuse the memory blocks of freed tensors of about the
/// same size. Call it once, before any thread and any tensor exists.
///
/// Every training step allocates the same sizes, from several threads. malloc would split and join
/// free memory in varying orders, so the process would grow for thousands of steps.
void reuse_tensor_memory();

}  // namespace distrain::app
