#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "distrain/net/loop.h"
#include "distrain/net/socket.h"
#include "distrain/wire/frame.h"

namespace distrain::net {

/// A frame to be sent. send() sets `header.meta_bytes` and `header.payload_bytes`.
struct OutFrame {
  wire::FrameHeader header;
  wire::Bytes meta;
  std::shared_ptr<const wire::Bytes> shared_meta;  ///< in place of `meta`, for several frames
  std::vector<std::span<const uint8_t>> payload;   ///< written one after the other, as they are
  std::shared_ptr<const void> keep_alive;          ///< held until the payload is copied
  /// The peer receives a copy of the descriptor over a unix socket after share_memory_on_loop().
  std::shared_ptr<const Fd> descriptor;

  const wire::Bytes& meta_bytes() const { return shared_meta ? *shared_meta : meta; }
  uint64_t payload_bytes() const;
};

/// Returns the bytes of its meta and payload.
uint64_t bytes_of(const OutFrame& frame);
/// Returns `invalid` for a frame beyond the default wire::Limits, at which the peer disconnects.
base::Status check_limits(const OutFrame& frame);

/// A frame as it was received. `body` owns the memory of the spans.
struct InFrame {
  wire::FrameHeader header;
  std::span<const uint8_t> meta;
  std::span<const uint8_t> payload;
  base::BufferPtr body;
  std::shared_ptr<const Fd> descriptor = nullptr;  ///< the one sent with this frame
  bool is_shared = false;  ///< the sender can change the payload at any time
};

/// Frames over a connected socket, TCP or unix.
///
/// Send: the calling thread writes to an idle socket itself, in gather-writes and without a lock.
/// The loop writes what the socket does not take and what other threads queue meanwhile. Receive:
/// on the loop, many small frames at once through a scratch buffer, a large body into the buffer
/// delivered. Close: the loop writes the queue, then waits up to a second for the peer's end.
/// Between processes of one host large payloads go through shared memory, if allowed, else large
/// payloads go over a bulk connection, if allowed. Order: frames arrive in the order of send(),
/// except that they overtake payloads in bulk: Note [Bulk connections] in src/net/bulk.h.
class Stream {
 public:
  struct Handler {
    std::function<void(InFrame)> on_frame;
    /// Called last, once: `peer_lost` if the peer closed, `protocol` for bytes that are no frame,
    /// `cancelled` after our own close().
    std::function<void(const base::Error&)> on_close;
    /// Called with each header before there is memory for the body. Returns body_bytes() of memory,
    /// or null for the stream's. If it throws, the stream ends with that error. May be empty.
    std::function<base::BufferPtr(const wire::FrameHeader&)> allocate = {};
  };

  virtual ~Stream() = default;
  /// Begins to deliver. Frames may be sent before.
  virtual void start(Handler handler, const wire::Limits& limits) = 0;
  /// Applies from the next frame on.
  virtual void set_limits_on_loop(const wire::Limits& limits) = 0;
  /// Replaces the handler. The earliest place to call this is inside the first on_frame.
  virtual void set_handler_on_loop(Handler handler) = 0;
  /// Lets frames of a unix socket carry descriptors, and large payloads go through shared memory of
  /// `bytes`, or through none if 0. Call it once the peer has proved who it is.
  virtual void share_memory_on_loop(uint64_t bytes) = 0;
  /// Lets payloads of at least wire::kLeastInBulk bytes travel over bulk connections. `open` is
  /// called on the loop when the first one waits, and must lead to send_bulk_on_loop(), or end the
  /// stream. Call it once the peer has proved who it is.
  virtual void use_bulk_on_loop(base::Task open) = 0;
  /// Sends payloads over `socket`, on another loop.
  virtual void send_bulk_on_loop(Loop& loop, Fd socket) = 0;
  /// Receives payloads from `socket`, on another loop. Returns false if there is a socket already.
  virtual bool receive_bulk_on_loop(Loop& loop, Fd socket) = 0;
  /// Ends the stream without on_close, and returns its socket; an invalid one if it has ended.
  virtual Fd take_socket_on_loop() = 0;
  /// Returns when the frame is written or queued. Returns an error if the stream is closed or if
  /// check_limits() rejects the frame. on_close reports a connection that breaks later.
  virtual base::Status send(OutFrame frame) = 0;
  /// Writes the queue, or drops it if not `flush`, then closes. Delivers frames until on_close.
  virtual void close(bool flush = true) = 0;
  /// Returns the time of the last bytes received, or of the start of the stream. If bytes wait to
  /// be read, returns the current time, unless the stream has paused reading.
  virtual base::TimePoint last_heard_on_loop() const = 0;
  /// Returns the peer's address for messages: "10.0.0.2:4711" or "unix".
  virtual const std::string& peer_name() const = 0;
  /// Returns peer_user() of the socket.
  virtual std::optional<uint32_t> peer_user_on_loop() = 0;
};
using StreamPtr = std::shared_ptr<Stream>;

/// Returns a stream that owns a connected, non-blocking socket (TCP or unix).
StreamPtr adopt_socket(Loop& loop, int fd);

}  // namespace distrain::net
