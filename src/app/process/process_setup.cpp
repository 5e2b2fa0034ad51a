#include "process/process_setup.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <torch/version.h>
#include <ucontext.h>
#include <unistd.h>

namespace distrain::app {
namespace {

namespace fs = std::filesystem;

constexpr auto kAnswerTime = std::chrono::seconds(1);  // of a thread that may sleep in the kernel
constexpr int kQuestion = SIGURG;                      // nobody minds one more

sigset_t asked_to_block;
std::atomic<int> answers{0};

/// In another thread: what it blocks once it has left the handler.
void block_what_is_asked(int, siginfo_t*, void* context) {
  sigset_t& mask = static_cast<ucontext_t*>(context)->uc_sigmask;
  for (int number = 1; number < SIGRTMIN; ++number) {
    if (sigismember(&asked_to_block, number) == 1) sigaddset(&mask, number);
  }
  ++answers;
}

/// Whether the thread blocks all of `set`, as the kernel tells. One that is gone does.
bool blocks(pid_t thread, const sigset_t& set) {
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  for (std::string word; status >> word;) {
    if (word != "SigBlk:") continue;
    uint64_t mask = 0;
    status >> std::hex >> mask;
    for (int number = 1; number < SIGRTMIN; ++number) {
      if (sigismember(&set, number) == 1 && !(mask >> (number - 1) & 1)) return false;
    }
    return true;
  }
  return true;
}

}  // namespace

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
  for (int fd = open("/dev/null", O_RDWR); fd >= 0; fd = open("/dev/null", O_RDWR)) {
    if (fd > STDERR_FILENO) {
      close(fd);
      break;
    }
  }
  return stdout_open;
}

void set_up_process() {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f` a write fails, and says so
  // Blocks up to the largest threshold that glibc takes come from the heap, and the heap is not
  // given back at each free: the page faults of fresh blocks halve ResNet50's speed.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  // Heaps of other threads than the first are given back whenever 64 MiB of one are free: half a
  // million page faults in 150 steps of a ConvNet that a worker trains, against 60,000 with one
  // heap for all.
  mallopt(M_ARENA_MAX, 1);
}

std::vector<int> ending_signals() {
  // A blocked signal is delivered to sigwait and signalfd even when it is ignored, so it matters.
  // Not for SIGINT: a script's `distrain hybrid &` ignores it too, and is still to be ended by one.
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler == SIG_IGN) return {SIGINT, SIGTERM};
  return {SIGINT, SIGTERM, SIGHUP};
}

std::vector<pid_t> other_threads() {
  std::vector<pid_t> threads;
  std::error_code error;  // without /proc there is one thread, as far as one can tell
  for (const auto& entry : fs::directory_iterator("/proc/self/task", error)) {
    const std::string name = entry.path().filename().string();
    pid_t thread = 0;
    std::from_chars(name.data(), name.data() + name.size(), thread);
    if (thread != gettid()) threads.push_back(thread);
  }
  return threads;
}

void block_in_all_threads(const sigset_t& set) {
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  std::vector<pid_t> open = other_threads();
  std::erase_if(open, [&set](pid_t thread) { return blocks(thread, set); });
  if (open.empty()) return;

  // A thread's mask is its own: each is asked, by a signal.
  asked_to_block = set;
  answers = 0;
  struct sigaction ask {};
  struct sigaction before {};
  ask.sa_sigaction = block_what_is_asked;
  ask.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(kQuestion, &ask, &before);
  int asked = 0;
  for (const pid_t thread : open) asked += syscall(SYS_tgkill, getpid(), thread, kQuestion) == 0;
  const auto deadline = base::deadline_after(kAnswerTime);
  while (answers < asked && base::Clock::now() < deadline) sched_yield();
  sigaction(kQuestion, &before, nullptr);
}

void leave_process(int exit_code) {
  std::fflush(nullptr);
  if (exit_code == 128 + SIGINT) {
    signal(SIGINT, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
    raise(SIGINT);  // comes back in a container's first process, which no signal ends
  }
  _exit(exit_code);
}

int set_up_threads(int wanted, int local_ranks) {
  if (wanted == 0 && !std::getenv("OMP_NUM_THREADS")) {
    cpu_set_t set;
    CPU_ZERO(&set);
    const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    wanted = std::max(1, cores / std::max(1, local_ranks));
  }
  if (wanted > 0) at::set_num_threads(wanted);
  try {
    at::set_num_interop_threads(1);  // no scenario uses torch's own inter-op pool
  } catch (const c10::Error&) {      // but main() has, before us
  }
  return at::get_num_threads();
}

std::string torch_version() { return TORCH_VERSION; }

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

double peak_rss_mb() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word == "VmHWM:") {
      double kib = 0;
      status >> kib;
      return kib / 1024;
    }
  }
  return 0;
}

}  // namespace distrain::app
