#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/net/stream.h"
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

/// Copies between devices and the memory that the network reads and writes, on streams of their own
/// beside the computing. One for each agent. Thread-safe; nothing of it blocks the loop.
class DeviceStager {
 public:
  DeviceStager() = default;
  /// Waits for the copies under way: their memory is this object's.
  ~DeviceStager();
  DeviceStager(const DeviceStager&) = delete;
  DeviceStager& operator=(const DeviceStager&) = delete;

  c10::Stream out_stream(c10::Device device) { return streams_of(device).out; }
  c10::Stream in_stream(c10::Device device) { return streams_of(device).in; }

  /// `size` bytes, a chunk at the most, that a device copies to and from without the CPU's help.
  /// Throws `resources`.
  base::BufferPtr host_block(c10::DeviceType type, size_t size);
  /// The same, only if there is one at hand; otherwise null. For the loop.
  base::BufferPtr idle_host_block(size_t size);
  /// Keeps `memory` until a device has come to `point`.
  void release_at(StreamPoint point, base::BufferPtr memory);

  /// A chunk of a transfer of rank `from` has come; throws `protocol` for one that does not fit.
  /// Gives back what is to be done about it on a worker, if it is not being done already.
  base::Task add_chunk_on_loop(int from, net::InFrame frame);
  /// The transfer `id` of rank `from`, whose chunks have all come. Throws `protocol` if they have
  /// not, or if it is another one than the message says.
  std::shared_ptr<class Arrival> take_arrival(int from, uint64_t id, wire::DeviceRef device,
                                              uint64_t bytes);
  /// Lets go of what has come in part from a rank that is lost. What is complete may belong to a
  /// message that is there and has not been looked at.
  void forget(int from);

 private:
  struct Streams {
    c10::Stream out;
    c10::Stream in;
  };
  struct Shelf;  // of idle host blocks; may outlive the stager

  Streams streams_of(c10::Device device);
  void sweep();

  std::mutex mutex_;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, Streams> streams_;
  std::vector<std::pair<StreamPoint, base::BufferPtr>> released_;
  std::mutex arrivals_mutex_;  // the loop's, too: never held while a device is asked
  std::map<std::pair<int, uint64_t>, std::shared_ptr<Arrival>> arrivals_;
  const std::shared_ptr<Shelf> shelf_ = make_shelf();
  static std::shared_ptr<Shelf> make_shelf();
};

/// A transfer on its way in: its chunks go to the device as they come.
class Arrival {
 public:
  Arrival(DeviceStager& stager, wire::DeviceRef device, uint64_t bytes)
      : stager_(stager), device_(device), bytes_(bytes) {}

  /// On the loop. True if copy_queued() has to be called.
  bool add_on_loop(net::InFrame frame);
  /// Puts the copies of what has come into the device's stream; any worker.
  void copy_queued();
  /// The last bytes, which came with the message. Gives back all of it, as bytes, and the point
  /// from which on they are there. Throws what a copy threw.
  std::pair<at::Tensor, StreamPoint> finish(std::span<const uint8_t> rest);

  wire::DeviceRef device() const { return device_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t received() const { return received_; }

 private:
  void copy_locked(std::span<const uint8_t> from, base::BufferPtr keep);

  DeviceStager& stager_;
  const wire::DeviceRef device_;
  const uint64_t bytes_;
  std::atomic<uint64_t> received_{0};

  std::mutex queue_mutex_;
  std::vector<net::InFrame> queue_;  // by queue_mutex_
  bool copying_ = false;             // by queue_mutex_: somebody will look at the queue

  std::mutex copy_mutex_;  // taken before queue_mutex_
  at::Tensor memory_;      // by copy_mutex_
  uint64_t copied_ = 0;    // by copy_mutex_
  std::optional<base::Error> error_;
};

/// A message with tensors on devices, on its way out.
class Departure {
 public:
  /// Puts the first copies into the devices' streams, behind what this thread's current streams
  /// have been given. `new_transfer` numbers transfers.
  Departure(DeviceStager& stager, OutMessage message, wire::FrameHeader header,
            const std::function<uint64_t()>& new_transfer);
  ~Departure();
  Departure(const Departure&) = delete;
  Departure& operator=(const Departure&) = delete;

  /// Sends the chunks as their copies are done, and the message. Blocks as long as the devices
  /// need: not on the loop. Throws what a copy throws.
  base::Status send(const std::function<base::Status(net::OutFrame)>& send);

 private:
  struct Piece {  // of a transfer
    size_t transfer = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    base::BufferPtr block;
    StreamPoint copied;
  };
  struct Transfer {
    DeviceGroup group;
    uint64_t id = 0;
    std::vector<at::Tensor> bytes;  // each tensor's, flat
  };

  base::Status send_chunks(const std::function<base::Status(net::OutFrame)>& send);
  net::OutFrame chunk_of(const Transfer& transfer) const;
  void begin_copy(Piece& piece);
  void await_copies() const;
  void begin_copies(size_t until);

  DeviceStager& stager_;
  OutMessage message_;
  const wire::FrameHeader header_;
  std::vector<Transfer> transfers_;
  std::vector<Piece> pieces_;  // the chunks of all groups; then what goes with the message
  size_t chunks_ = 0;          // of the pieces: go in frames of their own
  size_t begun_ = 0;           // pieces whose copy is in its stream
};

}  // namespace distrain::rpc
