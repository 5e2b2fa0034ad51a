#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/net/shared_memory.h"

namespace distrain::net {

// Note [Payloads in shared memory]
//
// Large payloads of a stream between two processes of one host travel through an *arena*: memory
// that the receiver owns. The receiver creates it when the first large payload has come over the
// socket, and sends its descriptor in a frame of kind kArena. From then on the sender copies a
// large payload into a *slot* of the arena, on the thread that sends, and the socket carries a
// header of kind kAttached (number and offset of the slot) and the frame without its payload. The
// slot itself is the buffer that the receiver delivers, so that a payload is copied once.
//
// An arena begins with a word for each slot number. When the last owner releases the buffer, the
// receiver writes 1 into the slot's word; the sender looks at these words when it needs room. If
// there is no room, because a user keeps received tensors, the payload goes over the socket.
//
// Neither side trusts the other. The receiver checks that a slot lies in the arena and overlaps
// none that is in use, and reads the meta of a frame only from the socket. The sender can still
// change a payload that it has sent: code that checks a payload copies it before. A receiver that
// releases slots too early can only damage its own payloads.

/// Begins at an arena's first byte.
inline constexpr uint32_t kArenaSlots = 1024;
inline constexpr uint64_t kArenaHead = kArenaSlots * sizeof(uint64_t);
/// Slots begin at multiples of this, so that each page belongs to one slot.
inline constexpr uint64_t kArenaPage = 4096;
/// Smaller payloads are written to the socket.
inline constexpr uint64_t kLeastInArena = uint64_t{32} << 10;

struct ArenaSlot {
  uint32_t number = 0;
  uint64_t offset = 0;  ///< from the arena's first byte
};

/// The sender's side of an arena. Thread-safe.
class SendArena {
 public:
  explicit SendArena(std::shared_ptr<SharedMemory> memory);
  /// Returns a slot for `bytes`, or nullopt if there is no room.
  std::optional<ArenaSlot> take(uint64_t bytes);
  uint8_t* at(const ArenaSlot& slot) const { return memory_->bytes().data() + slot.offset; }

 private:
  struct Used {
    uint64_t end;
    uint32_t number;
  };
  void take_back_locked();

  const std::shared_ptr<SharedMemory> memory_;
  std::mutex mutex_;
  std::map<uint64_t, Used> used_;  // by offset
  std::vector<uint32_t> numbers_;  // free
};

/// The receiver's side of an arena, which lives as long as the stream or a received buffer.
/// Thread-safe.
class ReceiveArena : public std::enable_shared_from_this<ReceiveArena> {
 public:
  explicit ReceiveArena(std::shared_ptr<SharedMemory> memory) : memory_(std::move(memory)) {}
  /// Returns the payload in `slot`, which goes back to the sender when the last owner releases it.
  /// Fails with `protocol` if the slot is not one that the sender may use.
  base::Result<base::BufferPtr> take(const ArenaSlot& slot, uint64_t bytes);

 private:
  void release(uint64_t offset);

  const std::shared_ptr<SharedMemory> memory_;
  std::mutex mutex_;
  std::map<uint64_t, std::pair<uint64_t, uint32_t>> used_;  // by offset: end, number
  std::vector<bool> taken_ = std::vector<bool>(kArenaSlots);
};

}  // namespace distrain::net
