#pragma once

#include <cstdint>
#include <string>

namespace distrain::base {

/// The CPUs that this process may use.
struct Cpus {
  int count = 1;     ///< of its affinity mask; fewer if a control group limits its CPU time
  uint64_t key = 0;  ///< equal for processes of one host that share these CPUs
};

/// Reads the affinity mask, and the CPU quotas of this process's control groups (v1 and v2) and of
/// all groups above them. `root` is put before each path that is read: for tests.
Cpus available_cpus(const std::string& root = {});

}  // namespace distrain::base
