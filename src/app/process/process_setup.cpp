#include "process/process_setup.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <map>
#include <thread>
#include <unordered_map>

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <malloc.h>
#include <sanitizer/asan_interface.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "process/output.h"

namespace distrain::app {
namespace {

bool is_directory_gone = false;

// Handles std::terminate(). If memory or threads ran out where no code catches the exception (while
// libraries are loaded, or on a library's thread), prints one line and exits. Otherwise aborts.
[[noreturn]] void end_unhandled() noexcept {
  try {
    if (std::current_exception()) throw;
  } catch (const std::bad_alloc&) {
    // say() would allocate and fail, and this handler would recurse until the stack overflows.
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

// Called before the constructors of shared libraries. If the working directory was deleted,
// oneMKL's constructor ends the process, so this function changes to "/" and main() reports the
// error. It is not instrumented by sanitizers, because they may not be initialized yet.
__attribute__((no_sanitize("address"))) __attribute__((no_sanitize("thread"))) void
begin_before_libraries() {
  std::set_terminate(end_unhandled);
  char path[PATH_MAX];
  if (syscall(SYS_getcwd, path, sizeof path) >= 0 || errno != ENOENT) return;
  is_directory_gone = syscall(SYS_chdir, "/") == 0;
}

[[gnu::section(".preinit_array"), gnu::used]] void (*before_libraries)() = begin_before_libraries;

/// Throws std::system_error if this process cannot start `count` more threads, because LibTorch
/// waits forever for a thread of its pool that did not start.
void expect_threads(int count) {
  std::vector<std::jthread> threads;
  std::promise<void> all;  // destroyed before `threads`, which ends the threads' wait
  const std::shared_future<void> end = all.get_future().share();
  while (count-- > 0) threads.emplace_back([end] { end.wait(); });
}

constexpr size_t kSmallest = size_t{64} << 10;  // malloc serves smaller blocks

/// Returns how many freed bytes may stay idle for reuse: an eighth of the machine's or container's
/// memory, at least 256 MiB. A ResNet stage frees some GB in each batch, which must fit in.
size_t max_idle() {
  auto memory = static_cast<size_t>(std::max(sysconf(_SC_PHYS_PAGES), 0L)) *
                static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t limit = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit) memory = std::min(memory, limit);
  return std::max(size_t{1} << 28, memory / 8);
}

/// Rounds up to one of eight sizes per power of two; at most an eighth of a block is unused.
size_t rounded(size_t bytes) {
  const size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

/// LibTorch's CPU allocator after reuse_tensor_memory(). Keeps freed blocks of at least kSmallest
/// bytes idle for reuse. Under AddressSanitizer, poisons idle blocks and unused ends of blocks.
class TensorMemory final : public c10::Allocator {
 public:
  explicit TensorMemory(c10::Allocator& malloc) : malloc_(malloc) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? malloc_.raw_allocate(bytes) : take(rounded(bytes));
    ASAN_UNPOISON_MEMORY_REGION(block, bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  /// The only object. Never destroyed, because tensors may outlive other static objects.
  static inline TensorMemory* instance = nullptr;

 private:
  void* take(size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      // Accept up to four times the size, so that an epoch's smaller last batch reuses blocks, too.
      const auto it = idle_.lower_bound(bytes);
      if (it != idle_.end() && it->first / 4 <= bytes) {
        void* block = it->second;
        idle_bytes_ -= it->first;
        idle_.erase(it);
        return block;
      }
    }
    void* block = allocate_new(bytes);
    ASAN_POISON_MEMORY_REGION(block, bytes);
    std::lock_guard lock(mutex_);
    sizes_[block] = bytes;
    return block;
  }

  void* allocate_new(size_t bytes) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        return malloc_.raw_allocate(bytes);
      } catch (const c10::Error&) {  // free the idle blocks and try again
        std::lock_guard lock(mutex_);
        make_room_locked(max_idle_, 0);
      }
    }
    throw base::Exception(base::ErrorKind::kResources,
                          "out of memory: no " + std::to_string(bytes >> 20) + " MiB for a tensor");
  }

  static void release(void* block) {
    if (block) instance->give_back(block);
  }

  void give_back(void* block) {
    {
      std::lock_guard lock(mutex_);
      const auto it = sizes_.find(block);
      if (it != sizes_.end()) {
        const size_t bytes = it->second;
        if (idle_bytes_ + bytes > max_idle_) make_room_locked(bytes, bytes);
        if (idle_bytes_ + bytes <= max_idle_) {
          ASAN_POISON_MEMORY_REGION(block, bytes);
          idle_bytes_ += bytes;
          idle_.emplace_hint(idle_.lower_bound(bytes), bytes, block);
          return;
        }
        sizes_.erase(it);
      }
    }
    malloc_.raw_deallocate(block);
  }

  /// Frees idle blocks until `bytes` more bytes may be idle. Spares blocks of size `but`, which the
  /// current phase of the job uses. Blocks of other sizes may be left from an earlier phase.
  void make_room_locked(size_t bytes, size_t but) {
    for (auto it = idle_.begin(); it != idle_.end() && idle_bytes_ + bytes > max_idle_;) {
      if (it->first == but) {
        it = idle_.upper_bound(but);
        continue;
      }
      sizes_.erase(it->second);
      malloc_.raw_deallocate(it->second);
      idle_bytes_ -= it->first;
      it = idle_.erase(it);
    }
  }

  c10::Allocator& malloc_;
  const size_t max_idle_ = max_idle();
  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;  // of the blocks that take() returned
  std::multimap<size_t, void*> idle_;        // by size; the block freed last comes first
  size_t idle_bytes_ = 0;
};

}  // namespace

void expect_working_directory() {
  if (!is_directory_gone) return;
  base::invalid("the working directory has been deleted: change to one that exists");
}

base::TimePoint process_start() {
  // Loading is CPU-bound, so the CPU time used until now is the time since exec. The start time in
  // /proc/self/stat is the time of fork, and a shell may exec much later.
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return std::chrono::steady_clock::now() - std::chrono::seconds(used.tv_sec) -
         std::chrono::nanoseconds(used.tv_nsec);
}

bool secure_standard_fds() {
  const bool stdout_open = fcntl(STDOUT_FILENO, F_GETFD) != -1;
  // open() returns the lowest free number, so the loop opens only the closed ones of 0, 1 and 2.
  int fd = STDIN_FILENO;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
  if (fd >= 0) close(fd);
  return stdout_open;
}

void set_up_process() {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a write beyond `ulimit -f` fails with an error
  // A rank may need a connection to each of a thousand other ranks, but the default limit is 1,024
  // descriptors, for the sake of programs that use select().
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = std::max(files.rlim_cur, std::min<rlim_t>(files.rlim_max, 65536));
    setrlimit(RLIMIT_NOFILE, &files);
  }
  // Allocate blocks up to 32 MiB, glibc's largest threshold, from the heap, and keep freed memory
  // there, because page faults in newly mapped blocks would halve ResNet50's speed.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  // Use one heap. glibc returns the heaps of other threads to the kernel whenever 64 MiB are free:
  // 500,000 page faults in 150 steps of a ConvNet, against 60,000 with one heap.
  mallopt(M_ARENA_MAX, 1);
  reuse_tensor_memory();
}

sigset_t ending_signals(std::initializer_list<int> more) {
  // Leave out SIGHUP if it is ignored, because sigwait() and signalfd would still receive it. Keep
  // an ignored SIGINT: shells ignore SIGINT for background jobs, but SIGINT must end the job.
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
    raise(SIGINT);  // returns in a container's first process, which SIGINT cannot kill
  }
  _exit(exit_code);
}

int set_up_threads(int wanted, int ranks) {
  if (wanted == 0 && !std::getenv("OMP_NUM_THREADS")) {
    wanted = std::max(1, base::available_cpus().count / std::max(1, ranks));
  }
  if (wanted > 1) expect_threads(wanted - 1);
  if (wanted > 0) at::set_num_threads(wanted);
  try {
    at::set_num_interop_threads(1);  // no job uses torch's inter-op pool
  } catch (const c10::Error&) {      // main() has set it already
  }
  return at::get_num_threads();
}

void reuse_tensor_memory() {
  TensorMemory::instance = new TensorMemory(*c10::GetDefaultCPUAllocator());
  c10::SetCPUAllocator(TensorMemory::instance);
}

}  // namespace distrain::app
