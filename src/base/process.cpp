#include "distrain/base/process.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <set>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "distrain/base/clock.h"
#include "distrain/base/text.h"

namespace distrain::base {
namespace {

constexpr auto kAnswerTime = std::chrono::seconds(1);  // limit: a thread may hang in the kernel
constexpr int kQuestion = SIGURG;                      // a signal that is ignored by default

sigset_t asked_to_block;
std::atomic<int> answers{0};

/// Signal handler. When it returns, the interrupted thread also blocks the set `asked_to_block`.
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

struct Limit {
  double cpus = std::numeric_limits<double>::infinity();
  std::string group;  ///< path of the cgroup that has this quota
};

/// Lowers `smallest` to a cgroup's quota (v1 or v2) if the quota is lower. "max" and -1 mean none.
void read_quota(const std::string& group, Limit& smallest) {
  double time = 0, period = 0;
  if (std::ifstream v2(group + "/cpu.max"); v2) {
    v2 >> time >> period;
  } else {
    std::ifstream(group + "/cpu.cfs_quota_us") >> time;
    std::ifstream(group + "/cpu.cfs_period_us") >> period;
  }
  if (time > 0 && period > 0 && time / period < smallest.cpus) smallest = {time / period, group};
}

Limit smallest_quota(const std::string& root) {
  Limit smallest;
  std::ifstream file(root + "/proc/self/cgroup");  // "0::/path" (v2), "4:cpu,cpuacct:/path" (v1)
  for (std::string line; std::getline(file, line);) {
    const auto parts = split(line, ':');
    if (parts.size() < 3) continue;
    const auto controllers = split(parts[1], ',');
    const bool is_v1 = std::ranges::find(controllers, "cpu") != controllers.end();
    if (!is_v1 && !parts[1].empty()) continue;
    const std::string mount = root + (is_v1 ? "/sys/fs/cgroup/cpu" : "/sys/fs/cgroup");
    // Read the root as well, because a container may see its own cgroup as the root.
    std::string path(parts[2]);
    while (!path.empty()) {
      read_quota(mount + path, smallest);
      path.resize(path.rfind('/'));
    }
    read_quota(mount, smallest);
  }
  return smallest;
}

/// The paths of all TemporaryPaths. Never destroyed, because threads may still run at process exit.
struct Paths {
  std::mutex mutex;
  std::set<std::string> all;
};

Paths& paths() {
  static auto* const instance = new Paths;
  return *instance;
}

void remove_from_disk(const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
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

  // A thread can change only its own mask, so each thread gets a signal whose handler changes it.
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

Cpus available_cpus(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool is_known = sched_getaffinity(0, sizeof set, &set) == 0;
  Cpus cpus{.count = is_known ? CPU_COUNT(&set) : 1};
  std::string key;
  std::ifstream(root + "/proc/sys/kernel/random/boot_id") >> key;
  key.append(reinterpret_cast<const char*>(&set), sizeof set);
  const Limit limit = smallest_quota(root);
  if (limit.cpus < cpus.count) {
    cpus.count = std::max(1, static_cast<int>(limit.cpus));
    struct stat info {};
    stat(limit.group.c_str(), &info);
    key += std::to_string(info.st_dev) + ':' + std::to_string(info.st_ino);
  }
  cpus.key = std::hash<std::string>()(key);
  return cpus;
}

TemporaryPath::TemporaryPath(std::string path) : path_(std::move(path)) {
  std::lock_guard lock(paths().mutex);
  paths().all.insert(path_);
}

TemporaryPath::~TemporaryPath() {
  std::lock_guard lock(paths().mutex);
  if (paths().all.erase(path_) > 0) remove_from_disk(path_);
}

void TemporaryPath::keep() {
  std::lock_guard lock(paths().mutex);
  paths().all.erase(path_);
}

std::unique_lock<std::mutex> TemporaryPath::remove_all() {
  std::unique_lock lock(paths().mutex);
  for (const std::string& path : paths().all) remove_from_disk(path);
  paths().all.clear();
  return lock;
}

}  // namespace distrain::base
