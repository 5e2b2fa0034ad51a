#include "shared_space.h"

#include <algorithm>
#include <cstring>

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include "distrain/base/process.h"

namespace distrain::collective {
namespace {

constexpr size_t kPage = 4096;
// A tensor starts at a huge page, so that the system can map it with few page faults.
constexpr size_t kAlignment = size_t{2} << 20;
// Address space for the tensors of one rank, and of all ranks. Memory is taken when it is written.
constexpr size_t kMostOfRank = size_t{64} << 30;
constexpr size_t kMostOfAll = size_t{256} << 30;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

/// The memory's parts, in this order: the CPUs of each rank, the slots' marks and headers, the
/// slots' data, and the tensors of allocate().
struct Layout {
  explicit Layout(size_t size)
      : marks((4 * size + 1) * sizeof(uint64_t)),
        head(rounded(marks + size * kHeaderBytes, 64)),
        slots(rounded(size * sizeof(base::Cpus), kPage)),
        data(slots + rounded(kCount * head, kPage)),
        tensors(rounded(data + kCount * size * SharedSpace::kSlotBytes, kAlignment)),
        each(std::min(kMostOfRank, kMostOfAll / size / kAlignment * kAlignment)),
        bytes(tensors + size * each) {}

  static constexpr size_t kCount = SharedSpace::kSequences * SharedSpace::kSlots;
  size_t marks;
  size_t head;
  size_t slots;
  size_t data;
  size_t tensors;
  size_t each;  // bytes of one rank's tensors
  size_t bytes;
};

}  // namespace

size_t SharedSpace::bytes_for(int size) { return Layout(static_cast<size_t>(size)).bytes; }

SharedSpace::SharedSpace(std::shared_ptr<net::SharedMemory> memory, int rank, int size)
    : memory_(std::move(memory)), rank_(rank), size_(static_cast<size_t>(size)) {
  const base::Cpus cpus = base::available_cpus();
  std::memcpy(memory_->bytes().data() + static_cast<size_t>(rank) * sizeof cpus, &cpus,
              sizeof cpus);
  const Layout layout(size_);
  // Only a hint: without huge pages the first use of a tensor takes more page faults.
  ::madvise(memory_->bytes().data() + layout.tensors, layout.bytes - layout.tensors, MADV_HUGEPAGE);
}

void SharedSpace::agree_on_reducers() {
  std::map<uint64_t, int64_t> counts;  // by set of CPUs; equal on all ranks, as the memory is
  for (size_t rank = 0; rank < size_; ++rank) {
    base::Cpus cpus;
    std::memcpy(&cpus, memory_->bytes().data() + rank * sizeof cpus, sizeof cpus);
    counts.emplace(cpus.key, cpus.count);
  }
  int64_t all = 0;
  for (const auto& [key, count] : counts) all += count;
  reducers_ = static_cast<int>(std::clamp<int64_t>(all, 1, static_cast<int64_t>(size_)));
}

SharedSpace::Slot SharedSpace::slot(uint32_t sequence, uint64_t number) const {
  const Layout layout(size_);
  Slot slot;
  slot.index = sequence * kSlots + number % kSlots;
  uint8_t* const head = memory_->bytes().data() + layout.slots + slot.index * layout.head;
  auto* marks = reinterpret_cast<Mark*>(head);
  for (std::span<Mark>& phase : slot.marks) {
    phase = {marks, size_};
    marks += size_;
  }
  slot.watching = {marks, size_};
  slot.waiting = marks + size_;
  slot.headers = head + layout.marks;
  slot.data = memory_->bytes().data() + layout.data + slot.index * size_ * kSlotBytes;
  return slot;
}

SlotUse SharedSpace::enter(const Slot& slot, SlotUse use) {
  std::lock_guard lock(mutex_);
  SlotQueue& queue = slots_[slot.index];
  queue.running.push_back({use.mark, false});
  // This rank may have taken no part in operations that the others have begun in between.
  if (use.mark != queue.newest.mark + kSlots) done_mark(slot).store(queue.done());
  return std::exchange(queue.newest, std::move(use));
}

void SharedSpace::leave(const Slot& slot, uint64_t mark) {
  std::lock_guard lock(mutex_);
  SlotQueue& queue = slots_[slot.index];
  std::ranges::find(queue.running, mark, &SlotQueue::Running::mark)->has_left = true;
  while (!queue.running.empty() && queue.running.front().has_left) queue.running.pop_front();
  done_mark(slot).store(queue.done());
}

uint8_t* SharedSpace::at(int rank, uint64_t place, size_t bytes) const {
  const Layout layout(size_);
  if (place % kAlignment != 0 || place > layout.each || bytes > layout.each - place) return nullptr;
  return memory_->bytes().data() + layout.tensors + static_cast<size_t>(rank) * layout.each + place;
}

at::Tensor SharedSpace::allocate(size_t bytes) {
  const size_t wanted = rounded(std::max<size_t>(bytes, 1), kAlignment);
  uint64_t place = 0;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [used, size] : used_) {
      if (used - place >= wanted) break;
      place = used + rounded(size, kAlignment);
    }
    if (!at(rank_, place, wanted)) {
      throw base::Exception(base::ErrorKind::kResources, "no address space for a shared tensor");
    }
    used_.emplace(place, bytes);
  }
  uint8_t* const data = at(rank_, place, wanted);
  const auto release = [self = shared_from_this(), place, data, wanted](void*) {
    ::madvise(data, wanted, MADV_REMOVE);  // gives the memory back to the system
    std::lock_guard lock(self->mutex_);
    self->used_.erase(place);
  };
  return at::from_blob(data, {static_cast<int64_t>(bytes)}, release, at::kByte);
}

std::optional<uint64_t> SharedSpace::place_of(const at::Tensor& tensor) const {
  const uint8_t* const begin = at(rank_, 0, 0);
  const auto* const data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  if (data < begin || !tensor.is_contiguous()) return std::nullopt;
  std::lock_guard lock(mutex_);
  const auto it = used_.find(static_cast<uint64_t>(data - begin));
  if (it == used_.end() || it->second != tensor.nbytes()) return std::nullopt;
  return it->first;
}

}  // namespace distrain::collective
