#include "process/process_setup.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <new>
#include <string_view>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <malloc.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "distrain/base/cpus.h"
#include "distrain/base/error.h"
#include "distrain/nn/tensor_memory.h"
#include "process/output.h"

namespace distrain::app {

namespace {

bool is_directory_gone = false;

// Prints one line if memory or threads run out where no handler can catch it: while libraries are
// set up, or on a thread of a library. Other exceptions abort, as they do by default.
[[noreturn]] void end_unhandled() noexcept {
  try {
    if (std::current_exception()) throw;
  } catch (const std::bad_alloc&) {
    // say() would allocate, fail as well, and come back here until the stack is full.
    constexpr std::string_view kLine = ": out of memory: is ulimit -v too small?\n";
    const char* const name = program_invocation_short_name;
    if (write(STDERR_FILENO, name, strlen(name)) > 0) write_all(STDERR_FILENO, kLine);
    _exit(base::exit_code(base::ErrorKind::kResources));
  } catch (...) {
    const base::Error error = base::current_error(base::ErrorKind::kInternal);
    say(error.message);
    if (error.kind == base::ErrorKind::kResources) _exit(base::exit_code(error.kind));
  }
  std::abort();
}

// Called before the constructors of shared libraries. oneMKL's ends a process whose working
// directory has been deleted, so this process leaves the directory, and says so in main(). The
// attributes and system calls are for the sanitizers, which may not be set up yet.
__attribute__((no_sanitize("address"))) __attribute__((no_sanitize("thread"))) void
begin_before_libraries() {
  std::set_terminate(end_unhandled);
  char path[PATH_MAX];
  if (syscall(SYS_getcwd, path, sizeof path) >= 0 || errno != ENOENT) return;
  is_directory_gone = syscall(SYS_chdir, "/") == 0;
}

[[gnu::section(".preinit_array"), gnu::used]] void (*before_libraries)() = begin_before_libraries;

}  // namespace

void expect_working_directory() {
  if (!is_directory_gone) return;
  base::invalid("the working directory has been deleted: change to one that exists");
}

base::TimePoint process_start() {
  // Loading is bound by the processor, so the time used until now is the time since exec. The
  // start time in /proc/self/stat would not do: it is the fork's, and a shell may exec much later.
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return std::chrono::steady_clock::now() - std::chrono::seconds(used.tv_sec) -
         std::chrono::nanoseconds(used.tv_nsec);
}

bool secure_standard_fds() {
  const bool stdout_open = fcntl(STDOUT_FILENO, F_GETFD) != -1;
  // open() takes the lowest free number: this fills 0, 1 and 2 and nothing else.
  int fd = STDIN_FILENO;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
  if (fd >= 0) close(fd);
  return stdout_open;
}

void set_up_process() {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f` a write fails, and says so
  // A rank may have a connection to each of a thousand others, and shells give 1,024 descriptors
  // for the sake of programs that use select().
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = std::max(files.rlim_cur, std::min<rlim_t>(files.rlim_max, 65536));
    setrlimit(RLIMIT_NOFILE, &files);
  }
  // Blocks up to the largest threshold that glibc takes come from the heap, and the heap is not
  // given back at each free: the page faults of fresh blocks halve ResNet50's speed.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  // Heaps of other threads than the first are given back whenever 64 MiB of one are free: half a
  // million page faults in 150 steps of a ConvNet, against 60,000 with one heap.
  mallopt(M_ARENA_MAX, 1);
  nn::reuse_tensor_memory();
}

sigset_t ending_signals(std::initializer_list<int> more) {
  // A blocked signal is delivered to sigwait and signalfd even when it is ignored, so it matters.
  // Not for SIGINT: a script's `distrain hybrid &` ignores it too, and is still to be ended by one.
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  sigset_t set = base::signal_set(more);
  for (const int number : {SIGINT, SIGTERM}) sigaddset(&set, number);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
  return set;
}

void leave_process(int exit_code) {
  std::fflush(nullptr);
  if (exit_code == 128 + SIGINT) {
    signal(SIGINT, SIG_DFL);
    const sigset_t set = base::signal_set({SIGINT});
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
    raise(SIGINT);  // comes back in a container's first process, which no signal ends
  }
  _exit(exit_code);
}

namespace {

/// Throws unless this process can start so many more threads: LibTorch waits forever for a thread
/// of its pool that could not be started.
void expect_threads(int count) {
  std::vector<std::jthread> threads;
  std::promise<void> all;  // destroyed first, which ends the threads' wait
  const std::shared_future<void> end = all.get_future().share();
  while (count-- > 0) threads.emplace_back([end] { end.wait(); });
}

}  // namespace

int set_up_threads(int wanted, int ranks) {
  if (wanted == 0 && !std::getenv("OMP_NUM_THREADS")) {
    wanted = std::max(1, base::available_cpus().count / std::max(1, ranks));
  }
  if (wanted > 1) expect_threads(wanted - 1);
  if (wanted > 0) at::set_num_threads(wanted);
  try {
    at::set_num_interop_threads(1);  // no scenario uses torch's own inter-op pool
  } catch (const c10::Error&) {      // but main() has, before us
  }
  return at::get_num_threads();
}

}  // namespace distrain::app
