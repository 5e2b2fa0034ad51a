#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include <ATen/core/Tensor.h>

#include "distrain/net/shared_memory.h"
#include "message.h"

namespace distrain::collective {

// Note [Collectives in shared memory]
//
// If all ranks of a group are on one host, they map the same memory: rank 0 creates it and passes
// its descriptor over the channel (kOffer), the others map it and answer, and rank 0 tells all
// whether to use it (kUse). Until then an allreduce or a barrier waits, so that all ranks choose
// the same algorithm.
//
// An operation in shared memory uses slot `number mod kSlots` of its sequence. Each rank writes its
// header and its tensor into its part of the slot, then its *mark*, which is the operation's number
// plus 1. When all ranks have marked phase 0, the reducers reduce a chunk each, in rank order, and
// mark phase 1; then all ranks copy the chunks out. There are as many reducers as CPUs, because
// more would only wait for each other. A small tensor of few ranks has no phase 1: each rank
// reduces all of it. When a rank no longer reads the slot, it marks phase `done`, and the next
// operation in the slot may write. Marks only grow. A bucket (see allocate()) is reduced where it
// lies: the reducers write the result to all ranks' buckets.
//
// A rank that waits reads the marks while it polls. `watching` counts its threads that do, of all
// operations in the slot. The rank whose mark completes a phase sends a message (kLook) to each
// rank that needs the phase and is not watching. Both sides first write, then read, sequentially
// consistent: a thread that stops watching looks again, also for later operations if its own has
// ended. So no rank sleeps on.
//
// Pages take memory when they are written: at most kSlots * kSlotBytes of each rank and sequence.
// Ranks trust each other's values, but not their addresses: those are checked after they are read.

class Operation;

/// An operation of this rank in a slot.
struct SlotUse {
  uint64_t mark = 0;
  std::weak_ptr<Operation> operation;
};

/// Memory that the ranks of a group on one host share; see Note [Collectives in shared memory].
/// Thread-safe.
class SharedSpace : public std::enable_shared_from_this<SharedSpace> {
 public:
  static constexpr uint32_t kSequences = 4;  ///< operations of later sequences use messages
  static constexpr uint64_t kSlots = 4;
  static constexpr size_t kSlotBytes = size_t{1} << 20;  ///< the largest tensor in a slot

  /// Returns the size of the memory for `size` ranks.
  static size_t bytes_for(int size);
  /// Uses `memory`, which rank 0 of the group has created, and notes the CPUs of `rank`.
  SharedSpace(std::shared_ptr<net::SharedMemory> memory, int rank, int size);

  using Mark = std::atomic<uint64_t>;
  static constexpr int kDone = 2;  ///< the phase after phases 0 and 1

  struct Slot {
    std::span<Mark> marks[3];  ///< by phase, then rank
    std::span<Mark> watching;  ///< by rank: threads that read the marks
    Mark* waiting = nullptr;   ///< ranks that wait for phase kDone
    uint8_t* headers = nullptr;
    uint8_t* data = nullptr;
    size_t index = 0;
  };
  Slot slot(uint32_t sequence, uint64_t number) const;
  std::span<uint8_t> header_of(const Slot& slot, int rank) const {
    return {slot.headers + static_cast<size_t>(rank) * kHeaderBytes, kHeaderBytes};
  }
  uint8_t* data_of(const Slot& slot, int rank) const {
    return slot.data + static_cast<size_t>(rank) * kSlotBytes;
  }
  /// Note that an operation of this rank begins or ends in a slot, and set this rank's mark of
  /// phase kDone. enter() returns the operation that began before.
  SlotUse enter(const Slot& slot, SlotUse use);
  void leave(const Slot& slot, uint64_t mark);

  /// Makes as many ranks reduce as there are CPUs. Called on each rank before the first operation,
  /// when all ranks have noted their CPUs.
  void agree_on_reducers();
  int reducers() const { return reducers_; }

  /// Returns an uninitialised tensor of `bytes` bytes that the other ranks can read and write, for
  /// allreduces of the whole tensor. Its memory is reused when nobody holds it. Throws `resources`.
  at::Tensor allocate(size_t bytes);
  /// Returns the place of `tensor` if it is the whole of a tensor that allocate() returned.
  std::optional<uint64_t> place_of(const at::Tensor& tensor) const;
  /// Returns the memory of `bytes` bytes at `place` of `rank`, or null if it is outside.
  uint8_t* at(int rank, uint64_t place, size_t bytes) const;

 private:
  /// The operations of this rank in a slot, in their order.
  struct SlotQueue {
    struct Running {
      uint64_t mark;
      bool has_left;
    };
    std::deque<Running> running;
    SlotUse newest;

    /// Returns the newest mark such that this rank reads the slot for no operation up to it.
    uint64_t done() const { return running.empty() ? newest.mark : running.front().mark - 1; }
  };
  Mark& done_mark(const Slot& slot) const { return slot.marks[kDone][static_cast<size_t>(rank_)]; }

  const std::shared_ptr<net::SharedMemory> memory_;
  const int rank_;
  const size_t size_;
  int reducers_ = 1;
  mutable std::mutex mutex_;
  std::array<SlotQueue, kSequences * kSlots> slots_;
  std::map<uint64_t, size_t> used_;  // allocated bytes by place, in this rank's part
};

}  // namespace distrain::collective
