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

#include "device_stager.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/device.h"

namespace distrain::rpc {

/// Open transfers of one rank at a time; a call that brings one more is `overloaded`.
inline constexpr size_t kMaxOpenTransfers = 1024;

/// A transfer on its way in: its chunks go to the device as they come.
class Arrival {
 public:
  /// Returns credit for bytes of a call that will not begin.
  using Return = std::function<void(uint64_t bytes)>;

  /// With an `error`, which finish() throws, its chunks are thrown away as they come.
  Arrival(DeviceStager& stager, wire::DeviceRef device, uint64_t bytes,
          std::optional<base::Error> error = {})
      : stager_(stager), device_(device), bytes_(bytes), error_(std::move(error)) {}
  ~Arrival() {
    if (credit_ > 0 && return_) return_(credit_);
  }
  Arrival(const Arrival&) = delete;
  Arrival& operator=(const Arrival&) = delete;

  /// It holds `bytes` of credit until somebody takes that, or its end.
  void hold_credit(uint64_t bytes, Return give_back) {
    credit_ = bytes;
    return_ = std::move(give_back);
  }
  uint64_t take_credit() { return std::exchange(credit_, 0); }

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
  /// But for what comes with the message.
  bool has_come() const { return received_ == chunked_bytes(bytes_); }

 private:
  void copy_locked(std::span<const uint8_t> from, base::BufferPtr keep);

  DeviceStager& stager_;
  const wire::DeviceRef device_;
  const uint64_t bytes_;
  uint64_t credit_ = 0;
  Return return_;
  std::atomic<uint64_t> received_{0};

  std::mutex queue_mutex_;
  std::vector<net::InFrame> queue_;  // by queue_mutex_
  bool copying_ = false;             // by queue_mutex_: somebody will look at the queue

  std::mutex copy_mutex_;             // taken before queue_mutex_
  at::Tensor memory_;                 // by copy_mutex_
  uint64_t copied_ = 0;               // by copy_mutex_
  std::optional<base::Error> error_;  // by copy_mutex_
};

/// The credit that this frame takes as the first one of a transfer; 0 for any other.
uint64_t credit_of_transfer(const wire::FrameHeader& header);

/// The transfers of one rank that come ahead of their messages. Held by the connection and by each
/// message of that rank that nobody has looked at yet, so it ends, and with it what is nobody's,
/// when the rank is lost and the last of these messages has been seen to.
class Arrivals {
 public:
  /// `give_back` is called on workers.
  Arrivals(DeviceStager& stager, int from, Arrival::Return give_back = {})
      : stager_(stager), from_(from), return_(std::move(give_back)) {}

  /// A chunk has come; throws `protocol` for one that does not fit. Gives back what is to be done
  /// about it on a worker, if it is not being done already. The loop lets go of no device's memory.
  base::Task add_chunk_on_loop(net::InFrame frame);
  /// The complete transfer `id`. Throws `protocol` if chunks are missing or another was told.
  std::shared_ptr<Arrival> take(uint64_t id, wire::DeviceRef device, uint64_t bytes);
  /// Lets go of what has come in part, when no more will come.
  void drop_parts();

 private:
  DeviceStager& stager_;
  const int from_;
  const Arrival::Return return_;
  std::mutex mutex_;  // the loop's, too: never held while a device is asked
  std::map<uint64_t, std::shared_ptr<Arrival>> open_;
};

}  // namespace distrain::rpc
