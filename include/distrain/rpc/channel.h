#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/trace.h"

namespace distrain::rpc {

/// Names a message within a channel; the layer above gives the three numbers their meaning.
struct ChannelTag {
  uint64_t a = 0;
  uint64_t b = 0;
  uint64_t c = 0;
  friend bool operator==(const ChannelTag&, const ChannelTag&) = default;
};

/// Something that a rank waits for, in words for people: see Agent::waits().
struct Wait {
  std::string what;  ///< with the ranks that it is for
  base::TimePoint since;
};

/// A message as it arrived. `payload` points into `body` and is aligned to 64 bytes.
struct ChannelMessage {
  int from = -1;
  ChannelTag tag;
  std::span<const uint8_t> payload;
  base::BufferPtr body;
};

/// One-way messages between the ranks of a job, beside the calls: in order for each pair of ranks,
/// delivered on the loop thread without a worker in between. What collectives are made of.
/// Obtained from Agent::open_channel; the agent owns it. Thread-safe.
class Channel {
 public:
  struct Handler {
    /// On the loop thread (to oneself: the sender's): must be quick, not block and not throw.
    std::function<void(ChannelMessage)> on_message;
    /// Rank `rank` is gone, for `error.kind` peer_lost or the reason it gave. On the loop thread.
    /// From here on nothing comes from it and sends to it fail.
    std::function<void(int rank, const base::Error& error)> on_peer_lost;
    /// What the layer above waits for now; empty: it does not tell. Any thread.
    std::function<std::vector<Wait>()> waits = {};
  };

  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// What records this rank's part of the job; may be null.
  virtual std::shared_ptr<base::Tracer> tracer() const { return nullptr; }

  /// Replaces the handler. Messages that came before the first one are kept for it. With an empty
  /// handler the channel drops what comes; returns only when no old handler runs any more.
  virtual void set_handler(Handler handler) = 0;

  /// Sends the pieces as one payload, in order. Returns when they are written or queued;
  /// `keep_alive` is held until the kernel has them all. Throws peer_lost naming the rank.
  virtual void send(int to, const ChannelTag& tag, std::span<const std::span<const uint8_t>> pieces,
                    std::shared_ptr<const void> keep_alive) = 0;
};

}  // namespace distrain::rpc
