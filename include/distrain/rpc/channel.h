#pragma once

#include <functional>
#include <span>
#include <string>

#include "distrain/base/buffer.h"
#include "distrain/base/error.h"
#include "distrain/base/trace.h"
#include "distrain/membership/loss.h"
#include "distrain/net/socket.h"

namespace distrain::rpc {

// The types and functions of layer `membership` that are part of an agent's interface.
using membership::incarnation_of;
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

/// A received message. `payload` points into `body` and is aligned to 64 bytes. `descriptor` is
/// null if none was sent, or if the ranks are not connected by a unix socket with shared memory.
struct ChannelMessage {
  int from = -1;
  ChannelTag tag;
  std::span<const uint8_t> payload;
  base::BufferPtr body;
  std::shared_ptr<const net::Fd> descriptor = {};
};

/// Sends one-way messages between the ranks of a job, in order for each pair of ranks and channel.
/// Received messages are handled directly on the loop thread, not by a worker. Collectives use
/// channels. Obtained from Agent::open_channel(); owned by the agent. Thread-safe.
class Channel {
 public:
  struct Handler {
    /// Must return quickly, and neither block nor throw. Runs on the loop thread, or on the sending
    /// thread if this rank is the sender, or in set_handler() if the message arrived earlier.
    std::function<void(ChannelMessage)> on_message;
    /// Called when `rank` is lost, with peer_lost or the error that the rank sent, or with
    /// `cancelled` by the thread that ends the agent. No message is sent to or received from the
    /// lost process afterwards. Runs on the loop, or in set_handler() for earlier losses.
    std::function<void(int rank, const base::Error& error)> on_peer_lost;
    /// Returns operations on this channel that wait for ranks. May be unset. Called on any thread.
    std::function<std::vector<Wait>()> waits = {};
  };

  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Returns this rank's tracer; null if there is none.
  virtual std::shared_ptr<base::Tracer> tracer() const { return nullptr; }
  /// Returns false if this rank may not share memory with the ranks of its host.
  virtual bool shares_memory() const { return true; }
  /// Returns a key that is equal for ranks on one host. Empty if `rank` uses only TCP.
  virtual std::string host_of(int /*rank*/) const { return {}; }
  /// Replaces the handler, and waits until no call of the previous handler is running. The new one
  /// gets the messages of that time, and the first handler all earlier messages. Without
  /// `on_message`, the channel drops messages.
  virtual void set_handler(Handler handler) = 0;
  /// Sends the concatenated `pieces` as one payload. Returns when the payload is written or queued.
  /// Holds `keep_alive` until the kernel has the payload. Throws peer_lost, which names rank `to`.
  /// A file descriptor is left out if the connection cannot carry it.
  virtual void send(int to, const ChannelTag& tag, std::span<const std::span<const uint8_t>> pieces,
                    std::shared_ptr<const void> keep_alive,
                    std::shared_ptr<const net::Fd> descriptor = {}) = 0;
};

}  // namespace distrain::rpc
