#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#include "support/fake_device_internal.h"

namespace distrain::testing::fake_device {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatType;

constexpr size_t kArenaBytes = size_t{4} << 30;  // of address space
constexpr int kPoison = 0xFF;

// The memory of one device: a memory file with one mapping for the device, which the CPU cannot
// access, and one for the host. Never shrinks.
class Arena {
 public:
  Arena() {
    const int file = memfd_create("fake", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kArenaBytes) != 0) fail();
    device_ = map(file, PROT_NONE);
    host_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  bool contains(const char* pointer) const {
    return pointer >= device_ && pointer < device_ + kArenaBytes;
  }
  char* host_of(const char* pointer) const { return host_ + (pointer - device_); }
  char* device_of(const Block& block) const { return device_ + (block.host - host_); }

  Block* block_of(const char* pointer) const {
    const auto after = blocks_.upper_bound(pointer);
    return after == blocks_.begin() ? nullptr : std::prev(after)->second;
  }

  // Returns a new block, or null if the arena is full.
  Block* carve(size_t size) {
    if (used_ + size > kArenaBytes) return nullptr;
    auto* const block = new Block;
    block->host = host_ + used_;
    block->size = size;
    std::memset(block->host, kPoison, size);
    blocks_[device_ + used_] = block;
    used_ += size;
    return block;
  }

 private:
  [[noreturn]] static void fail() {
    throw std::system_error(errno, std::generic_category(), "memory of the fake device");
  }
  static char* map(int file, int protection) {
    void* const at = mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) fail();
    madvise(at, kArenaBytes, MADV_DONTDUMP);
    return static_cast<char*>(at);
  }

  char* device_ = nullptr;
  char* host_ = nullptr;
  size_t used_ = 0;
  std::map<const char*, Block*> blocks_;
};

// Rounds up to one of eight sizes per power of two, so that a freed block is soon reused.
size_t size_class(size_t bytes) {
  constexpr size_t kSmallest = 512;
  size_t step = kSmallest;
  while (bytes > step * 16) step *= 2;
  return std::max(kSmallest, (bytes + step - 1) / step * step);
}

class FakeAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const Lock lock;
    const int device = current_device();
    const c10::Device place = fake(device);
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, place};
    touch(device);
    Device& here = devices_.at(static_cast<size_t>(device));
    reclaim(here);
    const size_t size = size_class(bytes);
    Queue& owner = queue_of(current_stream(device));
    Block* block = nullptr;
    std::vector<Block*>& free = here.free[{&owner, size}];
    const bool fits = here.bytes.current + static_cast<int64_t>(size) <= limit_;
    if (fits && !free.empty()) {
      block = free.back();
      free.pop_back();
    } else if (fits) {
      block = arena(device).carve(size);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block, "fake:", device, " is out of memory: ", bytes,
                     " bytes more than the ", here.bytes.current, " allocated");
    block->owner = &owner;
    block->device = device;
    here.bytes.increase(size);
    return {arena(device).device_of(*block), block, &release, place};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const Lock lock;
    Block* const target = block_of(to);
    Block* const source = block_of(from);
    Queue& queue = queue_of(current_stream(target->device));
    queue.add({target, source},
              [to = host_of(to), from = host_of(from), bytes] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_use(pointer.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock;
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto place = static_cast<size_t>(device);
    stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)] = devices_.at(place).bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const Lock lock;
    devices_.at(static_cast<size_t>(device)).bytes.reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock lock;
    devices_.at(static_cast<size_t>(device)).bytes.reset_peak();
  }

  // Returns the arena that contains `pointer`, or null if it is not device memory.
  Arena* find(const char* pointer) const {
    for (const Device& device : devices_) {
      if (device.arena && device.arena->contains(pointer)) return device.arena.get();
    }
    return nullptr;
  }
  void set_limit(int64_t bytes) { limit_ = bytes; }

 private:
  struct Deferred {
    Block* block;
    std::vector<std::pair<Queue*, uint64_t>> until;
  };
  struct Device {
    std::unique_ptr<Arena> arena;
    std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free;
    std::vector<Deferred> deferred;
    Stat bytes;
  };

  static void release(void* context);

  Arena& arena(int device) {
    auto& arena = devices_[static_cast<size_t>(device)].arena;
    if (!arena) arena = std::make_unique<Arena>();
    return *arena;
  }

  void free(Block& block) {
    Device& here = devices_[static_cast<size_t>(block.device)];
    here.bytes.decrease(block.size);
    if (block.users.empty()) return retire(here, block);
    Deferred deferred{&block, {}};
    for (Queue* const user : block.users) deferred.until.emplace_back(user, user->end());
    block.users.clear();
    here.deferred.push_back(std::move(deferred));
  }

  // Overwrites a freed block by work on the stream that allocated it, so that later work on this
  // stream finds the block poisoned.
  static void retire(Device& device, Block& block) {
    block.owner->add({}, [&block] { std::memset(block.host, kPoison, block.size); });
    block.poisoned_at = block.owner->end();
    device.free[{block.owner, block.size}].push_back(&block);
  }

  // Retires each deferred block if all recorded streams have finished with it. Runs no stream.
  static void reclaim(Device& device) {
    std::erase_if(device.deferred, [&](const Deferred& deferred) {
      const bool done = std::all_of(deferred.until.begin(), deferred.until.end(),
                                    [](const auto& use) { return use.first->reached(use.second); });
      if (done) retire(device, *deferred.block);
      return done;
    });
  }

  std::array<Device, kFakeDevices> devices_;
  int64_t limit_ = INT64_MAX;
};

FakeAllocator& allocator() {
  static FakeAllocator& made = *new FakeAllocator;
  return made;
}

void FakeAllocator::release(void* context) {
  const Lock lock;
  allocator().free(*static_cast<Block*>(context));
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::kCPU};
    check_health();
    touch(current_device());
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 4096, bytes) == 0, "no pinned memory");
    std::memset(memory, kPoison, bytes);
    const Lock lock;
    ranges_[static_cast<char*>(memory)] = bytes;
    return {memory, memory, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool contains(const void* pointer) const {
    const Lock lock;
    const auto* const at = static_cast<const char*>(pointer);
    const auto after = ranges_.upper_bound(at);
    return after != ranges_.begin() && at < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static void release(void* memory);

  std::map<const char*, size_t> ranges_;
};

PinnedAllocator& pinned() {
  static PinnedAllocator& made = *new PinnedAllocator;
  return made;
}

void PinnedAllocator::release(void* memory) {
  {
    const Lock lock;
    pinned().ranges_.erase(static_cast<char*>(memory));
  }
  std::free(memory);
}

}  // namespace

c10::DeviceAllocator& device_allocator() { return allocator(); }

c10::Allocator& pinned_allocator() { return pinned(); }

bool is_pinned(const void* pointer) { return pinned().contains(pointer); }

char* host_of(const void* pointer) {
  const Lock lock;
  const auto* const at = static_cast<const char*>(pointer);
  const Arena* const arena = allocator().find(at);
  TORCH_CHECK(arena, "this is no memory of the fake device");
  return arena->host_of(at);
}

Block* block_of(const void* pointer) {
  const Lock lock;
  const auto* const at = static_cast<const char*>(pointer);
  const Arena* const arena = allocator().find(at);
  return arena ? arena->block_of(at) : nullptr;
}

void record_use(const void* pointer, const c10::Stream& stream) {
  const Lock lock;
  Block* const block = block_of(pointer);
  Queue* const user = &queue_of(stream);
  if (!block || user == block->owner) return;
  if (std::find(block->users.begin(), block->users.end(), user) == block->users.end()) {
    block->users.push_back(user);
  }
}

}  // namespace distrain::testing::fake_device

namespace distrain::testing {

FakeDeviceMemoryLimit::FakeDeviceMemoryLimit(int64_t bytes) {
  const fake_device::Lock lock;
  fake_device::allocator().set_limit(bytes);
}
FakeDeviceMemoryLimit::~FakeDeviceMemoryLimit() {
  const fake_device::Lock lock;
  fake_device::allocator().set_limit(INT64_MAX);
}

int64_t fake_bytes_in_use(int device) {
  using c10::CachingAllocator::StatType;
  return fake_device::allocator()
      .getDeviceStats(static_cast<c10::DeviceIndex>(device))
      .allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)]
      .current;
}

}  // namespace distrain::testing
