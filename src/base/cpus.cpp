#include "distrain/base/cpus.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>

#include <sched.h>
#include <sys/stat.h>

#include "distrain/base/text.h"

namespace distrain::base {
namespace {

struct Limit {
  double cpus = std::numeric_limits<double>::infinity();
  std::string group;  ///< path of the cgroup that has this quota
};

/// Lowers `smallest` to the quota of a cgroup, v2 or v1. "max" and -1 mean that it has no quota.
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
    // A container may see its own cgroup as the root, whatever its path, so the root is read, too.
    std::string path(parts[2]);
    while (!path.empty()) {
      read_quota(mount + path, smallest);
      path.resize(path.rfind('/'));
    }
    read_quota(mount, smallest);
  }
  return smallest;
}

}  // namespace

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

}  // namespace distrain::base
