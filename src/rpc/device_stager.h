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

/// Pieces in which tensors of devices travel. One is copied while the one before is on the network.
inline constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

/// Of a transfer of `bytes`: those that go in chunks of their own, ahead of the message. The rest,
/// a chunk at the most, goes in the message's payload.
constexpr uint64_t chunked_bytes(uint64_t bytes) {
  return bytes == 0 ? 0 : (bytes - 1) / kChunkBytes * kChunkBytes;
}

/// The tensors of a message that go to one device of its receiver lie packed, one after the other
/// at multiples of 64, as one transfer.
struct DeviceGroup {
  wire::DeviceRef device;       ///< of the receiver
  std::vector<size_t> tensors;  ///< their places in the message
  wire::PayloadLayout layout;
};
std::vector<DeviceGroup> group_by_device(const std::vector<wire::TensorDesc>& tensors);

/// Blocks of host memory that one message has lent to the network and not got back yet.
class BlocksSent : public std::enable_shared_from_this<BlocksSent> {
 public:
  /// What those of one stager share.
  struct Gate {
    std::mutex mutex;
    std::condition_variable returned;
    bool open = false;  // nobody waits any more
  };
  explicit BlocksSent(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}

  /// `block`, counted until the last copy of what this gives back ends.
  std::shared_ptr<const void> count(base::BufferPtr block);
  /// Blocks this thread. Throws `overloaded` when its pool has no other one.
  void await_fewer_than(size_t number);

 private:
  const std::shared_ptr<Gate> gate_;
  size_t number_ = 0;  // by the gate's mutex
};

/// Copies between devices and the memory that the network reads and writes, on streams of their own
/// beside the computing. One for each agent. Thread-safe; nothing of it blocks the loop.
class DeviceStager {
 public:
  DeviceStager();
  /// Waits for the copies under way: their memory is this object's.
  ~DeviceStager();

  c10::Stream out_stream(c10::Device device) { return streams_of(device).out; }
  c10::Stream in_stream(c10::Device device) { return streams_of(device).in; }

  /// At most a chunk that `device` copies to and from without the CPU's help. Throws `resources`.
  base::BufferPtr host_block(c10::Device device, size_t size);
  /// The same, only if there is one at hand; otherwise null. For the loop.
  base::BufferPtr idle_host_block(size_t size);
  /// Keeps `memory` until a device has come to `point`.
  void release_at(StreamPoint point, base::BufferPtr memory);

  /// `frames` chunks have come in: for those that lay in other memory for want of an idle block,
  /// one more is made for later ones, up to a bound. On a worker.
  void restock(c10::Device device, size_t frames);

  std::shared_ptr<BlocksSent> new_blocks_sent() { return std::make_shared<BlocksSent>(sending_); }
  /// Nobody waits for the network any more. For the end of an agent.
  void stop_waiting();

 private:
  struct Streams {
    c10::Stream out;
    c10::Stream in;
  };
  struct Shelf;  // of idle host blocks; may outlive the stager

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
