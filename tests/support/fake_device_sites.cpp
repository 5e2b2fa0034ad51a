// Lists the stream waits that a test program makes, or omits one; for tests/fake_device/mutants.sh.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <vector>

#include <execinfo.h>
#include <link.h>

#include "support/fake_device_internal.h"

namespace distrain::testing::fake_device {

namespace {

constexpr int kFrames = 24;
constexpr size_t kCallers = 8;  // recorded callers of a wait

/// The address range of the test program.
struct Program {
  Program() {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
          auto* self = static_cast<Program*>(data);
          self->base = info->dlpi_addr;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& segment = info->dlpi_phdr[i];
            if (segment.p_type == PT_LOAD) self->end = segment.p_vaddr + segment.p_memsz;
          }
          return 1;  // ends the iteration: the first object is the program
        },
        this);
  }
  uintptr_t base = 0;
  uintptr_t end = 0;  // relative to `base`
};

class Sites {
 public:
  Sites() {
    if (const char* path = std::getenv("DISTRAIN_FAKE_DEVICE_SITES")) list_ = std::fopen(path, "a");
    if (const char* site = std::getenv("DISTRAIN_FAKE_DEVICE_DROP"))
      drop_ = std::strtoull(site, nullptr, 16);
  }

  /// Returns true if the program must omit this wait; otherwise lists the call stack of the wait.
  bool visit() {
    if (!list_ && drop_ == 0) return false;
    std::array<void*, kFrames> frames;
    const int count = backtrace(frames.data(), kFrames);
    std::vector<uintptr_t> callers;
    for (int i = 0; i < count && callers.size() < kCallers; ++i) {
      const uintptr_t at =
          reinterpret_cast<uintptr_t>(frames[static_cast<size_t>(i)]) - program_.base;
      if (at < program_.end) callers.push_back(at);
    }
    for (const uintptr_t caller : callers) {
      if (drop_ != 0 && caller == drop_) return true;
    }
    std::lock_guard lock(mutex_);
    if (list_ && known_.insert(callers).second) {
      for (const uintptr_t caller : callers) std::fprintf(list_, "%zx ", size_t{caller});
      std::fprintf(list_, "\n");
      std::fflush(list_);
    }
    return false;
  }

 private:
  const Program program_;
  std::FILE* list_ = nullptr;
  uintptr_t drop_ = 0;
  std::mutex mutex_;
  std::set<std::vector<uintptr_t>> known_;
};

}  // namespace

bool wait_is_dropped() {
  static auto& sites = *new Sites;
  return sites.visit();
}

}  // namespace distrain::testing::fake_device
