#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "device/device_stager.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/device.h"

namespace distrain::rpc {

/// The limit for one rank's unfinished transfers; a call with one more fails with `overloaded`.
inline constexpr size_t kMaxOpenTransfers = 1024;

/// A transfer that is being received: its chunks are copied to the device as they arrive.
class IncomingTransfer {
 public:
  /// Returns credit of a call that will not begin.
  using Return = std::function<void(uint64_t bytes)>;

  /// With an `error`, which finish() throws, its chunks are dropped.
  IncomingTransfer(DeviceStager& stager, wire::DeviceRef device, uint64_t bytes,
                   std::optional<base::Error> error = {})
      : stager_(stager), device_(device), bytes_(bytes), error_(std::move(error)) {}
  ~IncomingTransfer() {
    if (credit_ > 0 && return_) return_(credit_);
  }
  IncomingTransfer(const IncomingTransfer&) = delete;
  IncomingTransfer& operator=(const IncomingTransfer&) = delete;

  /// Holds `bytes` of credit until take_credit(), or returns it when destroyed.
  void hold_credit(uint64_t bytes, Return give_back) {
    credit_ = bytes;
    return_ = std::move(give_back);
  }
  uint64_t take_credit() { return std::exchange(credit_, 0); }

  /// Returns true if copy_queued() has to be called. On the loop.
  bool add_on_loop(net::InFrame frame);
  /// Enqueues the copies of received chunks in the device's stream. On a worker.
  void copy_queued();
  /// Takes the last bytes, which came with the message. Returns the whole transfer as bytes, and
  /// the point after which it is complete. Throws the error of a failed copy.
  std::pair<at::Tensor, StreamPoint> finish(std::span<const uint8_t> rest);

  wire::DeviceRef device() const { return device_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t received() const { return received_; }
  /// Returns true if all chunks have been received.
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

/// Returns the credit that a frame takes as the first of a transfer; 0 for any other frame.
uint64_t credit_of_transfer(const wire::FrameHeader& header);

/// The transfers of one rank that precede their messages. Owned by the connection and by each
/// message of that rank that is not decoded yet. So it is destroyed, with unclaimed transfers, when
/// the rank is lost and the last of these messages is decoded.
class DeviceReceive {
 public:
  /// `give_back` is called on workers.
  DeviceReceive(DeviceStager& stager, int from, IncomingTransfer::Return give_back = {})
      : stager_(stager), from_(from), return_(std::move(give_back)) {}

  /// Takes a chunk. Throws `protocol` if it does not fit its transfer. Returns a task for a worker,
  /// if one is needed: the loop neither copies nor frees device memory.
  base::Task add_chunk_on_loop(net::InFrame frame);
  /// Takes out the transfer `id`. Throws `protocol` if it is incomplete, or not as described.
  std::shared_ptr<IncomingTransfer> take(uint64_t id, wire::DeviceRef device, uint64_t bytes);
  /// Releases incomplete transfers, when no more chunks will come.
  void drop_incomplete();

 private:
  DeviceStager& stager_;
  const int from_;
  const IncomingTransfer::Return return_;
  std::mutex mutex_;  // the loop locks it, so it is never held during a device call
  std::map<uint64_t, std::shared_ptr<IncomingTransfer>> open_;
};

}  // namespace distrain::rpc
