#include "arena.h"

#include <atomic>
#include <numeric>

namespace distrain::net {
namespace {

// The word of slot `number`, which both processes read and write.
std::atomic_ref<uint64_t> word(const SharedMemory& memory, uint32_t number) {
  return std::atomic_ref(reinterpret_cast<uint64_t*>(memory.bytes().data())[number]);
}

uint64_t whole_pages(uint64_t bytes) { return (bytes + kArenaPage - 1) / kArenaPage * kArenaPage; }

}  // namespace

SendArena::SendArena(std::shared_ptr<SharedMemory> memory)
    : memory_(std::move(memory)), numbers_(kArenaSlots) {
  std::iota(numbers_.begin(), numbers_.end(), 0);
}

// Takes the first gap, because its pages have been touched most likely.
std::optional<ArenaSlot> SendArena::take(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  take_back_locked();
  const uint64_t size = memory_->bytes().size();
  if (numbers_.empty() || bytes > size) return std::nullopt;
  bytes = whole_pages(bytes);
  uint64_t offset = kArenaHead;
  for (const auto& [begin, used] : used_) {
    if (begin - offset >= bytes) break;
    offset = used.end;
  }
  if (size - offset < bytes) return std::nullopt;
  const ArenaSlot slot{numbers_.back(), offset};
  numbers_.pop_back();
  used_.emplace(offset, Used{offset + bytes, slot.number});
  return slot;
}

void SendArena::take_back_locked() {
  for (auto it = used_.begin(); it != used_.end();) {
    const std::atomic_ref<uint64_t> released = word(*memory_, it->second.number);
    if (released.load(std::memory_order_acquire) == 0) {
      ++it;
      continue;
    }
    released.store(0, std::memory_order_relaxed);
    numbers_.push_back(it->second.number);
    it = used_.erase(it);
  }
}

base::Result<base::BufferPtr> ReceiveArena::take(const ArenaSlot& slot, uint64_t bytes) {
  const base::Error wrong{base::ErrorKind::kProtocol,
                          "a slot outside of the shared memory or in use"};
  const uint64_t size = memory_->bytes().size();
  if (slot.number >= kArenaSlots || slot.offset < kArenaHead || slot.offset % kArenaPage != 0 ||
      slot.offset > size || bytes == 0 || bytes > size - slot.offset) {
    return wrong;
  }
  {
    std::lock_guard lock(mutex_);
    const auto next = used_.lower_bound(slot.offset);
    const bool overlaps = (next != used_.end() && next->first < slot.offset + bytes) ||
                          (next != used_.begin() && std::prev(next)->second.first > slot.offset);
    if (overlaps || taken_[slot.number]) return wrong;
    used_.emplace(slot.offset, std::pair(slot.offset + bytes, slot.number));
    taken_[slot.number] = true;
  }
  auto* const buffer = new base::Buffer{memory_->bytes().data() + slot.offset, bytes};
  return base::BufferPtr(buffer,
                         [self = shared_from_this(), offset = slot.offset](base::Buffer* b) {
                           self->release(offset);
                           delete b;
                         });
}

void ReceiveArena::release(uint64_t offset) {
  std::lock_guard lock(mutex_);
  const auto it = used_.find(offset);
  const uint32_t number = it->second.second;
  used_.erase(it);
  taken_[number] = false;
  word(*memory_, number).store(1, std::memory_order_release);
}

}  // namespace distrain::net
