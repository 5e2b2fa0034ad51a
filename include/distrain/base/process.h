#pragma once

#include <cstdint>
#include <initializer_list>
#include <mutex>
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
/// Blocks the signals in all existing threads. Otherwise the kernel could deliver a signal to a
/// thread that does not block it, and sigwait() or a signalfd would not receive the signal.
void block_in_all_threads(const sigset_t& set);

/// The CPUs that this process may use.
struct Cpus {
  int count = 1;     ///< CPUs in the affinity mask; fewer if a cgroup limits the CPU time
  uint64_t key = 0;  ///< equal for processes on one host that share these CPUs
};

/// Reads the CPUs from the affinity mask and from the CPU quotas of this process's cgroups (v1 and
/// v2) and their ancestors. Tests set `root`, a prefix of each path that is read.
Cpus available_cpus(const std::string& root = {});

/// A file or folder that is removed by the destructor, or by remove_all() when the process exits.
class TemporaryPath {
 public:
  /// Owns `path`, which exists or is about to be created. No other object may own the same path.
  explicit TemporaryPath(std::string path);
  ~TemporaryPath();
  TemporaryPath(TemporaryPath&&) = delete;

  const std::string& path() const { return path_; }
  /// Releases the path without removing it, for example because it was renamed.
  void keep();
  /// Removes the paths of all objects, for a process that calls _exit(), which runs no destructors.
  /// While the caller holds the returned lock, no new object can be made.
  [[nodiscard]] static std::unique_lock<std::mutex> remove_all();

 private:
  const std::string path_;
};

}  // namespace distrain::base
