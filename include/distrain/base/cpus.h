#pragma once

#include <cstdint>
#include <string>

namespace distrain::base {

/// The CPUs that this process may use.
struct Cpus {
  int count = 1;     ///< CPUs in the affinity mask; fewer if a cgroup limits the CPU time
  uint64_t key = 0;  ///< equal for processes on one host that share these CPUs
};

/// Reads the affinity mask, and the CPU quotas of this process's cgroups (v1 and v2) and their
/// ancestors. `root` is a prefix of each path that is read, for tests.
Cpus available_cpus(const std::string& root = {});

}  // namespace distrain::base
