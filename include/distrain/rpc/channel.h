#pragma once

#include <functional>
#include <span>

#include "distrain/base/buffer.h"
#include "distrain/base/error.h"
#include "distrain/base/trace.h"
#include "distrain/membership/loss.h"

namespace distrain::rpc {

// The types and functions of layer `membership` that belong to the interface of an agent.
using membership::incarnation_of;
using membership::kMaxIncarnations;
using membership::kMaxRanks;
using membership::Loss;
using membership::make_id;
using membership::maker_of;
using membership::process_number;
using membership::ProcessNumber;
using membership::rank_of;
using membership::Wait;

/// Identifies a message within a channel; the layer above defines the three numbers.
struct ChannelTag {
  uint64_t a = 0;
  uint64_t b = 0;
  uint64_t c = 0;
  friend bool operator==(const ChannelTag&, const ChannelTag&) = default;
};

/// A received message. `payload` points into `body` and is aligned to 64 bytes.
struct ChannelMessage {
  int from = -1;
  ChannelTag tag;
  std::span<const uint8_t> payload;
  base::BufferPtr body;
};

/// Sends one-way messages between the ranks of a job, in order for each pair of ranks, and delivers
/// them on the loop thread without a worker in between. Collectives are built on it. Obtained from
/// Agent::open_channel(); owned by the agent. Thread-safe.
class Channel {
 public:
  struct Handler {
    /// Must be quick and neither block nor throw. Called on the loop thread, on the sender's for a
    /// message to itself, or in set_handler() for messages that came earlier.
    std::function<void(ChannelMessage)> on_message;
    /// Called when `rank` is lost, with peer_lost or the reason that it sent; nothing can be sent
    /// to it or comes from it afterwards. On the loop, in set_handler() or when the agent ends.
    std::function<void(int rank, const base::Error& error)> on_peer_lost;
    /// Returns the waits of the layer above the channel. May be unset. Called on any thread.
    std::function<std::vector<Wait>()> waits = {};
  };

  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Returns the tracer of this rank; may be null.
  virtual std::shared_ptr<base::Tracer> tracer() const { return nullptr; }
  /// Replaces the handler, and delivers messages that came before the first one to it. With an
  /// empty handler the channel drops messages. Returns when no previous handler is running.
  virtual void set_handler(Handler handler) = 0;
  /// Sends `pieces`, concatenated, as one payload. Returns when it is written or queued;
  /// `keep_alive` is held until the kernel has taken it. Throws peer_lost, which names the rank.
  virtual void send(int to, const ChannelTag& tag, std::span<const std::span<const uint8_t>> pieces,
                    std::shared_ptr<const void> keep_alive) = 0;
};

}  // namespace distrain::rpc
