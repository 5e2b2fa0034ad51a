#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/base/result.h"
#include "distrain/net/loop.h"
#include "distrain/wire/codec.h"
#include "distrain/wire/frame.h"
#include "distrain/wire/limits.h"

namespace distrain::net {

/// A frame to be sent. `header.meta_bytes` and `header.payload_bytes` are filled in by send().
struct OutFrame {
  wire::FrameHeader header;
  wire::Bytes meta;
  std::shared_ptr<const wire::Bytes> shared_meta;  ///< in place of `meta`, for several frames
  std::vector<std::span<const uint8_t>> payload;   ///< written one after the other, as they are
  std::shared_ptr<const void> keep_alive;          ///< held until the kernel has the payload

  const wire::Bytes& meta_bytes() const { return shared_meta ? *shared_meta : meta; }
  uint64_t payload_bytes() const;
};

/// Returns the bytes of its meta and payload.
uint64_t bytes_of(const OutFrame& frame);

/// Returns `invalid` for a frame beyond the default wire::Limits, at which the peer disconnects.
base::Status check_limits(const OutFrame& frame);

/// A frame as it was received. The spans point into `body`.
struct InFrame {
  wire::FrameHeader header;
  std::span<const uint8_t> meta;
  std::span<const uint8_t> payload;
  base::BufferPtr body;
};

/// Frames over a connected socket, TCP or unix.
///
/// Send: the calling thread writes to an idle socket itself, in gather-writes and without a lock;
/// what the socket does not take, and what others send meanwhile, is queued and written by the
/// loop. States: idle (a caller writes) → draining (the loop writes, callers queue) → idle; →
/// closing (the queue is written, nothing is added; then the peer's end is awaited, a second at
/// most) → closed. Receive: on the loop; small frames many at a time through a scratch buffer, the
/// body of a large one straight into the buffer it is delivered in.
class Stream {
 public:
  struct Handler {
    std::function<void(InFrame)> on_frame;
    /// Exactly once, last: peer_lost when the other side closed, protocol for bytes that are not a
    /// frame, cancelled after our own close().
    std::function<void(const base::Error&)> on_close;
    /// Called with each header before there is memory for its body. Returns that memory, of
    /// body_bytes(), or null for the loop's. If it throws, the stream ends with that. May be empty.
    std::function<base::BufferPtr(const wire::FrameHeader&)> allocate = {};
  };

  virtual ~Stream() = default;

  /// Begins to deliver. Frames sent before are fine.
  virtual void start(Handler handler, const wire::Limits& limits) = 0;

  /// From the next frame on. On the loop thread.
  virtual void set_limits_on_loop(const wire::Limits& limits) = 0;
  /// Replaces all of them. On the loop thread, from inside on_frame at the earliest.
  virtual void set_handler_on_loop(Handler handler) = 0;

  /// Returns when the frame is written or queued; an error when the stream is closed, `invalid` for
  /// a frame beyond the default wire::Limits. A connection that breaks later is told by on_close.
  virtual base::Status send(OutFrame frame) = 0;

  /// Writes what is queued, then closes; drops it and closes at once if `flush` is false. Frames
  /// may still be delivered until on_close.
  virtual void close(bool flush = true) = 0;

  /// When the last bytes came; before any, when the stream was started. On the loop thread.
  virtual base::TimePoint last_heard_on_loop() const = 0;

  /// The other side's address, for messages: "10.0.0.2:4711" or "unix".
  virtual const std::string& peer_name() const = 0;
  /// peer_user() of its socket. On the loop thread.
  virtual std::optional<uint32_t> peer_user_on_loop() = 0;
};
using StreamPtr = std::shared_ptr<Stream>;

/// Makes a stream of a connected, non-blocking socket (TCP or unix); the stream owns it from here.
StreamPtr adopt_socket(Loop& loop, int fd);

}  // namespace distrain::net
