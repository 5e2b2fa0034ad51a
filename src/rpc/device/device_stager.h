#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/rpc/device.h"
#include "distrain/rpc/message.h"

namespace distrain::rpc {

/// Size of the pieces in which device tensors are sent. One is copied while another is being sent.
inline constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

/// Returns the bytes of a transfer that precede the message in chunks. The rest, at most a chunk,
/// is in the message's payload.
constexpr uint64_t chunked_bytes(uint64_t bytes) {
  return bytes == 0 ? 0 : (bytes - 1) / kChunkBytes * kChunkBytes;
}

/// The tensors of a message for one device of the receiver. They are packed into one transfer, each
/// at a multiple of 64 bytes.
struct DeviceGroup {
  wire::DeviceRef device;       ///< of the receiver
  std::vector<size_t> tensors;  ///< indices in the message
  wire::PayloadLayout layout;
};
std::vector<DeviceGroup> group_by_device(const std::vector<wire::TensorDesc>& tensors);

/// Counts a message's host blocks that the network still uses.
class BlocksSent : public std::enable_shared_from_this<BlocksSent> {
 public:
  /// Shared by all messages of one stager.
  struct Gate {
    std::mutex mutex;
    std::condition_variable returned;
    bool open = false;  // true: nobody waits any more
  };
  explicit BlocksSent(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}

  /// Counts `block` until the last copy of the result is destroyed. The result owns the block.
  std::shared_ptr<const void> count(base::BufferPtr block);
  /// Blocks this thread. Throws `overloaded` if the thread pool has no other thread left.
  void await_fewer_than(size_t number);

 private:
  const std::shared_ptr<Gate> gate_;
  size_t number_ = 0;  // guarded by the gate's mutex
};

/// Copies between devices and network buffers, on streams of their own. One for each agent.
/// Thread-safe; no function blocks the loop.
class DeviceStager {
 public:
  DeviceStager();
  /// Waits for copies in progress, because they use host blocks that this object keeps.
  ~DeviceStager();

  c10::Stream out_stream(c10::Device device) { return streams_of(device).out; }
  c10::Stream in_stream(c10::Device device) { return streams_of(device).in; }

  /// Returns pinned memory of `size` bytes, at most a chunk. Throws `resources`. Not for the loop.
  base::BufferPtr host_block(c10::Device device, size_t size);
  /// Returns an idle block, or null if there is none. For the loop.
  base::BufferPtr idle_host_block(size_t size);
  /// Keeps `memory` until a device has reached `point`.
  void release_at(StreamPoint point, base::BufferPtr memory);

  /// Allocates a block, up to a limit, for each of the last `frames` chunks that were received
  /// without an idle block. On a worker.
  void restock(c10::Device device, size_t frames);

  std::shared_ptr<BlocksSent> new_blocks_sent() { return std::make_shared<BlocksSent>(sending_); }
  /// Ends all waits of await_fewer_than(), when the agent ends.
  void stop_waiting();

 private:
  struct Streams {
    c10::Stream out;
    c10::Stream in;
  };
  struct Shelf;  // the idle host blocks; may outlive the stager

  Streams streams_of(c10::Device device);
  void sweep();
  base::BufferPtr take_idle_block(size_t size);

  std::mutex mutex_;
  std::unordered_map<c10::Device, Streams> streams_;
  std::vector<std::pair<StreamPoint, base::BufferPtr>> released_;
  const std::shared_ptr<Shelf> shelf_;
  const std::shared_ptr<BlocksSent::Gate> sending_ = std::make_shared<BlocksSent::Gate>();
};

}  // namespace distrain::rpc
