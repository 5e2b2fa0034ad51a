#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "net_impl.h"

namespace distrain::net {

/// Parses the bytes of a socket into frames: many small frames at once through the loop's scratch
/// buffer, the rest of a large one directly into the memory that is delivered. Takes payloads from
/// the receive arena: Note [Payloads in shared memory]. Loop thread only.
class FrameReader {
 public:
  /// `deliver` gets each frame; the payload of a frame in bulk is missing. `allocate` is
  /// Stream::Handler's. Both may throw, and may call stop().
  struct Callbacks {
    std::function<void(InFrame)> deliver;
    std::function<base::BufferPtr(const wire::FrameHeader&)> allocate;
  };
  explicit FrameReader(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  /// Reads until the socket is empty, `most` bytes have come or stop() is called. Returns 0 at the
  /// end of the connection, an errno, or nullopt. Throws for bytes that are no frame.
  std::optional<int> read(Loop::Impl& loop, int fd, size_t most);
  /// Drops what is incomplete. read() drops all that still comes.
  void stop();

  wire::Limits limits;
  /// From now on frames may have descriptors and slots of `arena`, which may be set later.
  bool takes_descriptors = false;
  std::shared_ptr<ReceiveArena> arena;
  base::TimePoint last_heard;

 private:
  ssize_t receive(int fd, std::span<uint8_t> bytes);
  void take_bytes(Loop::Impl& loop, size_t bytes);
  bool consume(Loop::Impl& loop, std::span<const uint8_t>& unread);
  void begin_frame(Loop::Impl& loop);
  void end_frame(Loop::Impl& loop);
  void take_attached();

  const Callbacks callbacks_;
  bool is_stopped_ = false;
  std::array<uint8_t, wire::kHeaderBytes> head_;  // the beginning of an incomplete header
  size_t head_filled_ = 0;
  wire::FrameHeader header_;  // of the frame being read, when body_ is set
  base::BufferPtr body_;
  std::span<uint8_t> room_;                            // where the rest of the frame belongs
  std::deque<std::shared_ptr<const Fd>> descriptors_;  // received, and not yet announced
  std::shared_ptr<const Fd> attached_;                 // of the next frame
  std::optional<ArenaSlot> slot_;                      // of the next frame
  base::BufferPtr in_arena_;                           // payload of the frame being read
};

/// Returns one pointer that owns `body` and `payload`.
base::BufferPtr owner_of(base::BufferPtr body, base::BufferPtr payload);
[[noreturn]] void fail_attached();

}  // namespace distrain::net
