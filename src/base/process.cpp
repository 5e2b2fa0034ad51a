#include "distrain/base/process.h"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <fmt/format.h>
#include <sched.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "distrain/base/clock.h"

namespace distrain::base {
namespace {

constexpr auto kAnswerTime = std::chrono::seconds(1);  // a thread may be blocked in the kernel
constexpr int kQuestion = SIGURG;                      // ignored by default

sigset_t asked_to_block;
std::atomic<int> answers{0};

/// Signal handler: blocks `asked_to_block` in its thread as soon as the handler returns.
void block_what_is_asked(int, siginfo_t*, void* context) {
  sigset_t& mask = static_cast<ucontext_t*>(context)->uc_sigmask;
  sigorset(&mask, &mask, &asked_to_block);
  ++answers;
}

/// Returns the word after `name` in a status file of /proc, or an empty text.
std::string status_word(const std::string& path, std::string_view name) {
  std::ifstream status(path);
  for (std::string word; status >> word;) {
    if (word == name && status >> word) return word;
  }
  return {};
}

/// Returns true if /proc says that `thread` blocks all of `set`, or if the thread has exited.
bool blocks(pid_t thread, const sigset_t& set) {
  const std::string text = status_word(fmt::format("/proc/self/task/{}/status", thread), "SigBlk:");
  const uint64_t mask = text.empty() ? ~uint64_t{0} : std::stoull(text, nullptr, 16);
  for (int number = 1; number < SIGRTMIN; ++number) {
    if (sigismember(&set, number) == 1 && !(mask >> (number - 1) & 1)) return false;
  }
  return true;
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

std::optional<std::string> variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

std::optional<pid_t> ancestor(std::string_view part) {
  for (pid_t pid = getppid(); pid > 0;) {
    const std::string status = fmt::format("/proc/{}/status", pid);
    if (status_word(status, "Name:").find(part) != std::string::npos) return pid;
    pid = static_cast<pid_t>(std::strtol(status_word(status, "PPid:").c_str(), nullptr, 10));
  }
  return std::nullopt;
}

double peak_rss_mb() {
  return std::strtod(status_word("/proc/self/status", "VmHWM:").c_str(), nullptr) / 1024;
}

std::vector<pid_t> other_threads() {
  std::vector<pid_t> threads;
  std::error_code error;  // without /proc, only the calling thread is known
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    const pid_t thread = std::stoi(entry.path().filename());
    if (thread != gettid()) threads.push_back(thread);
  }
  return threads;
}

sigset_t signal_set(std::initializer_list<int> numbers) {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : numbers) sigaddset(&set, number);
  return set;
}

void block_in_all_threads(const sigset_t& set) {
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  std::vector<pid_t> open = other_threads();
  std::erase_if(open, [&set](pid_t thread) { return blocks(thread, set); });
  if (open.empty()) return;

  // A thread can change only its own signal mask, so signal each thread; the handler changes it.
  asked_to_block = set;
  answers = 0;
  struct sigaction ask {};
  struct sigaction before {};
  ask.sa_sigaction = block_what_is_asked;
  ask.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(kQuestion, &ask, &before);
  int asked = 0;
  for (const pid_t thread : open) asked += syscall(SYS_tgkill, getpid(), thread, kQuestion) == 0;
  const auto deadline = deadline_after(kAnswerTime);
  while (answers < asked && Clock::now() < deadline) sched_yield();
  sigaction(kQuestion, &before, nullptr);
}

}  // namespace distrain::base
