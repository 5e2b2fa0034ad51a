// Tests CPU quotas of control groups with a fake /proc and a fake /sys.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include <sched.h>
#include <stdlib.h>

#include "distrain/base/process.h"
#include "support/catch.h"

using namespace distrain;

namespace {

/// A temporary folder that replaces the kernel's /proc and /sys.
class Root {
 public:
  explicit Root(const std::string& groups) {
    REQUIRE(mkdtemp(path_.data()) != nullptr);
    write("/proc/self/cgroup", groups);
  }
  ~Root() { std::filesystem::remove_all(path_); }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path whole = path_ + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text << '\n';
  }
  base::Cpus cpus() const { return base::available_cpus(path_); }

 private:
  std::string path_ = (std::filesystem::temp_directory_path() / "cpus-XXXXXX").string();
};

/// Returns the smaller of `count` and the number of CPUs in this process's affinity mask.
int at_most(int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  REQUIRE(sched_getaffinity(0, sizeof set, &set) == 0);
  return std::min(count, CPU_COUNT(&set));
}

}  // namespace

TEST_CASE("without a quota the CPUs are those of the affinity mask") {
  const Root root("0::/job");
  const base::Cpus all = root.cpus();
  CHECK(all.count == at_most(1 << 20));
  root.write("/sys/fs/cgroup/job/cpu.max", "max 100000");
  CHECK(root.cpus().count == all.count);
  CHECK(root.cpus().key == all.key);
  CHECK(base::available_cpus("/nowhere").count == all.count);
}

TEST_CASE("the smallest quota among the parent control groups applies (version 2)") {
  const Root root("0::/slice/job/step");
  const base::Cpus all = root.cpus();
  root.write("/sys/fs/cgroup/slice/job/step/cpu.max", "6400000 100000");
  root.write("/sys/fs/cgroup/slice/cpu.max", "190000 100000");
  const base::Cpus limited = root.cpus();
  CHECK(limited.count == 1);
  root.write("/sys/fs/cgroup/slice/job/cpu.max", "50000 100000");
  CHECK(root.cpus().count == 1);
  if (all.count > 1) {
    CHECK(limited.key != all.key);
    CHECK(root.cpus().key != limited.key);  // the group with the smallest quota has changed
  }
}

TEST_CASE("quotas of version 1 apply, also if a container sees only a part of the hierarchy") {
  const Root whole("4:memory:/m\n3:cpu,cpuacct:/a/b");
  whole.write("/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1");
  whole.write("/sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000");
  CHECK(whole.cpus().count == at_most(1 << 20));
  whole.write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "100000");
  whole.write("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000");
  CHECK(whole.cpus().count == 1);

  const Root part("3:cpu,cpuacct:/docker/c1");
  part.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000");
  part.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  CHECK(part.cpus().count == 1);
}
