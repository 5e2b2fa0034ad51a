#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "distrain/base/thread_state.h"
#include "distrain/rpc/message.h"

namespace distrain::rpc {

/// Size of the chunks of a device tensor. One chunk is copied while another is being sent.
inline constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

/// Returns how many of a transfer's bytes are sent in chunks before the message. The rest, at most
/// one chunk, is in the message's payload.
constexpr uint64_t chunked_bytes(uint64_t bytes) {
  return bytes == 0 ? 0 : (bytes - 1) / kChunkBytes * kChunkBytes;
}

/// A message's tensors for one device of the receiver. They are packed into one transfer, each at
/// an offset that is a multiple of 64 bytes.
struct DeviceGroup {
  wire::DeviceRef device;       ///< of the receiver
  std::vector<size_t> tensors;  ///< indices in the message
  wire::PayloadLayout layout;
};
std::vector<DeviceGroup> group_by_device(const std::vector<wire::TensorDesc>& tensors);

/// Counts the blocks of host memory of one message that the network still uses.
class BlocksSent : public std::enable_shared_from_this<BlocksSent> {
 public:
  /// State that all messages of one DeviceStager share, so that it can end all their waits.
  struct Gate {
    std::mutex mutex;
    std::condition_variable returned;
    bool open = false;  // true: await_fewer_than() returns at once
  };
  explicit BlocksSent(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
  /// Counts `block` as in use until the last copy of the result, which owns it, is destroyed.
  std::shared_ptr<const void> count(base::BufferPtr block) {
    {
      std::lock_guard lock(gate_->mutex);
      ++number_;
    }
    const void* const data = block->data;
    return {data, [self = shared_from_this(), block = std::move(block)](const void*) mutable {
              block = nullptr;
              std::lock_guard lock(self->gate_->mutex);
              --self->number_;
              self->gate_->returned.notify_all();
            }};
  }
  /// Waits until fewer than `number` blocks are in use. Throws `overloaded` if no thread is left.
  void await_fewer_than(size_t number) {
    const auto may_go_on = [&] { return number_ < number || gate_->open; };
    {
      std::lock_guard lock(gate_->mutex);
      if (may_go_on()) return;
    }
    const base::BlockingScope blocking;
    std::unique_lock lock(gate_->mutex);
    gate_->returned.wait(lock, may_go_on);
  }

 private:
  const std::shared_ptr<Gate> gate_;
  size_t number_ = 0;  // guarded by the gate's mutex
};

/// Provides streams and blocks of pinned host memory for copies between devices and network
/// buffers. Each agent has one. Thread-safe; no function blocks the loop.
class DeviceStager {
 public:
  DeviceStager();
  /// Waits for copies in progress, because they use host blocks that this object owns.
  ~DeviceStager() {
    for (const auto& [point, memory] : released_) point.wait_in_destructor();
  }
  c10::Stream out_stream(c10::Device device) { return streams_of(device).out; }
  c10::Stream in_stream(c10::Device device) { return streams_of(device).in; }
  /// Returns a block of `size` bytes, at most kChunkBytes. Throws `resources` if there is no
  /// memory. Must not run on the loop.
  base::BufferPtr host_block(c10::Device device, size_t size);
  /// Returns an idle block, or null if there is none. May run on the loop.
  base::BufferPtr idle_host_block(size_t size);
  /// Keeps `memory` alive until the device has reached `point`.
  void release_at(StreamPoint point, base::BufferPtr memory) {
    bool many = false;
    {
      std::lock_guard lock(mutex_);
      released_.emplace_back(std::move(point), std::move(memory));
      many = released_.size() > kMaxReleased;
    }
    if (many) sweep();
  }
  /// Allocates an idle block for each chunk that arrived when no block was idle, for at most
  /// `frames` chunks and up to a total limit. Must run on a worker.
  void restock(c10::Device device, size_t frames);

  std::shared_ptr<BlocksSent> new_blocks_sent() { return std::make_shared<BlocksSent>(sending_); }
  /// Ends all waits in await_fewer_than(), because the agent ends.
  void stop_waiting() {
    std::lock_guard lock(sending_->mutex);
    sending_->open = true;
    sending_->returned.notify_all();
  }

 private:
  struct Streams {
    c10::Stream out;
    c10::Stream in;
  };
  struct Shelf;                               // the idle host blocks; may outlive the stager
  static constexpr size_t kMaxReleased = 16;  // above it, release_at() looks for completed copies

  Streams streams_of(c10::Device device) {
    std::lock_guard lock(mutex_);
    const auto known = streams_.find(device);
    if (known != streams_.end()) return known->second;
    return streams_.emplace(device, Streams{side_stream(device), side_stream(device)})
        .first->second;
  }
  void sweep() {
    std::vector<base::BufferPtr> done;  // released without the lock
    std::lock_guard lock(mutex_);
    std::erase_if(released_, [&](auto& entry) {
      if (!entry.first.reached()) return false;
      done.push_back(std::move(entry.second));
      return true;
    });
  }
  base::BufferPtr take_idle_block(size_t size);

  std::mutex mutex_;
  std::unordered_map<c10::Device, Streams> streams_;
  std::vector<std::pair<StreamPoint, base::BufferPtr>> released_;
  const std::shared_ptr<Shelf> shelf_;
  const std::shared_ptr<BlocksSent::Gate> sending_ = std::make_shared<BlocksSent::Gate>();
};

/// Maximum number of one rank's unfinished transfers. Above it, calls fail with `overloaded`.
inline constexpr size_t kMaxOpenTransfers = 1024;

/// A transfer that is being received: its chunks are copied to the device as they arrive.
class IncomingTransfer {
 public:
  /// Called to return the credit of a call that will not begin.
  using Return = std::function<void(uint64_t bytes)>;
  /// If `error` is set, drops all chunks, and finish() throws the error.
  IncomingTransfer(DeviceStager& stager, wire::DeviceRef device, uint64_t bytes,
                   std::optional<base::Error> error = {})
      : stager_(stager), device_(device), bytes_(bytes), error_(std::move(error)) {}
  ~IncomingTransfer() {
    if (credit_ > 0 && return_) return_(credit_);
  }
  IncomingTransfer(const IncomingTransfer&) = delete;
  IncomingTransfer& operator=(const IncomingTransfer&) = delete;

  /// Holds credit until take_credit(). If nobody takes it, the destructor calls `give_back`.
  void hold_credit(uint64_t bytes, Return give_back) {
    credit_ = bytes;
    return_ = std::move(give_back);
  }
  uint64_t take_credit() { return std::exchange(credit_, 0); }
  /// Adds a chunk. Returns true if copy_queued() must be called. Runs on the loop.
  bool add_on_loop(net::InFrame frame) {
    received_ += frame.payload.size();
    std::lock_guard lock(queue_mutex_);
    queue_.push_back(std::move(frame));
    return !std::exchange(copying_, true);
  }
  /// Enqueues the copies of received chunks in the device's stream. Must run on a worker.
  void copy_queued();
  /// Takes the last bytes, which came with the message. Returns the whole transfer as a byte tensor
  /// and the point at which it is complete. Throws the error of a failed copy.
  std::pair<at::Tensor, StreamPoint> finish(std::span<const uint8_t> rest);

  wire::DeviceRef device() const { return device_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t received() const { return received_; }
  bool is_complete() const { return received_ == chunked_bytes(bytes_); }

 private:
  void copy_locked(std::span<const uint8_t> from, base::BufferPtr keep);

  DeviceStager& stager_;
  const wire::DeviceRef device_;
  const uint64_t bytes_;
  uint64_t credit_ = 0;
  Return return_;
  std::atomic<uint64_t> received_{0};

  std::mutex queue_mutex_;
  std::vector<net::InFrame> queue_;  // guarded by queue_mutex_
  bool copying_ = false;             // guarded by queue_mutex_: a copy_queued() will read the queue

  std::mutex copy_mutex_;             // taken before queue_mutex_
  at::Tensor memory_;                 // guarded by copy_mutex_
  uint64_t copied_ = 0;               // guarded by copy_mutex_
  std::optional<base::Error> error_;  // guarded by copy_mutex_
};

/// If a frame is the first of a transfer, returns the credit that the transfer takes; else 0.
uint64_t credit_of_transfer(const wire::FrameHeader& header);

/// The device transfers from one rank, which arrive before the messages that they belong to. Owned
/// by the connection and by undecoded messages of that rank, so a transfer that no message takes is
/// destroyed at the latest once the rank is lost and the last of these messages is decoded.
class DeviceReceive {
 public:
  /// `give_back` is called on worker threads.
  DeviceReceive(DeviceStager& stager, int from, IncomingTransfer::Return give_back = {})
      : stager_(stager), from_(from), return_(std::move(give_back)) {}

  /// Takes a chunk. Throws `protocol` if the chunk does not fit its transfer. May return a task for
  /// a worker, because the loop must not copy or free device memory.
  base::Task add_chunk_on_loop(net::InFrame frame);
  /// Takes out the transfer `id`. Throws `protocol` if it is incomplete or does not match.
  std::shared_ptr<IncomingTransfer> take(uint64_t id, wire::DeviceRef device, uint64_t bytes);
  /// Releases incomplete transfers. Called when no more chunks can arrive.
  void drop_incomplete() {
    std::vector<std::shared_ptr<IncomingTransfer>> gone;  // released without the lock
    std::lock_guard lock(mutex_);
    std::erase_if(open_, [&](auto& entry) {
      if (entry.second->is_complete()) return false;
      gone.push_back(std::move(entry.second));
      return true;
    });
  }

 private:
  DeviceStager& stager_;
  const int from_;
  const IncomingTransfer::Return return_;
  std::mutex mutex_;  // the loop locks it, so it is never held during a device call
  std::map<uint64_t, std::shared_ptr<IncomingTransfer>> open_;
};

/// Limits for one message: copies of chunks enqueued ahead of sending, and blocks in send queues.
inline constexpr size_t kCopiesAhead = 8;
inline constexpr size_t kMaxSending = 8;

/// Sends a message with device tensors.
class DeviceSend {
 public:
  /// Enqueues the first copies, behind the work in this thread's current streams. `new_transfer`
  /// returns the number of a new transfer. Throws `invalid` if a transfer is too large.
  DeviceSend(DeviceStager& stager, OutMessage message, wire::FrameHeader header,
             const std::function<uint64_t()>& new_transfer);
  DeviceSend(const DeviceSend&) = delete;
  DeviceSend& operator=(const DeviceSend&) = delete;

  /// Returns the unsent bytes, as the receiver counts them for credit.
  uint64_t bytes_left() const { return bytes_left_; }
  /// Called before the message itself is sent. May change its body. Returns false to cancel it.
  using StillWanted = std::function<bool(wire::Bytes& body)>;
  /// Sends the chunks as their copies complete, then the message. Must not run on the loop, because
  /// it blocks. Returns `cancelled` if `still_wanted` returns false. Throws if a copy failed.
  base::Status send(const std::function<base::Status(net::OutFrame)>& send,
                    const StillWanted& still_wanted = {});

 private:
  // A part of a transfer. The destructor waits for its copy, which uses the tensors and the block.
  struct Piece {
    ~Piece() { copied.wait_in_destructor(); }
    size_t transfer = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    base::BufferPtr block;
    StreamPoint copied;
  };
  struct Transfer {
    DeviceGroup group;
    uint64_t id = 0;
    c10::Device device;             // of the sender
    std::vector<at::Tensor> bytes;  // each tensor as flat bytes
  };

  Transfer make_transfer(DeviceGroup group) const;
  std::vector<uint64_t> transfer_ids() const {
    std::vector<uint64_t> ids;
    for (const Transfer& transfer : transfers_) ids.push_back(transfer.id);
    return ids;
  }
  base::Status send_chunks(const std::function<base::Status(net::OutFrame)>& send,
                           const StillWanted& still_wanted);
  net::OutFrame chunk_of(const Transfer& transfer) const;
  void begin_copy(Piece& piece);
  void begin_copies(size_t until) {
    for (; begun_ < std::min(until, pieces_.size()); ++begun_) begin_copy(pieces_[begun_]);
  }

  DeviceStager& stager_;
  OutMessage message_;
  const wire::FrameHeader header_;
  std::vector<Transfer> transfers_;
  std::vector<Piece> pieces_;  // the chunks of all transfers, then the last piece of each
  size_t chunks_ = 0;          // number of the pieces that are chunks
  uint64_t bytes_left_ = 0;    // a transfer counts as sent with its first chunk
  size_t begun_ = 0;           // pieces whose copy is enqueued
  const std::shared_ptr<BlocksSent> sending_;
};

}  // namespace distrain::rpc
