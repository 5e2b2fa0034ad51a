#pragma once

#include <vector>

#include <uv.h>

#include "distrain/net/stream.h"

namespace distrain::net {

/// `invalid` for a frame beyond the limits: it would make the peer drop the connection and all that
/// goes over it.
base::Status check_limits(const OutFrame& frame);

/// A frame on its way out: its header encoded, and how much of it is written.
class PendingFrame {
 public:
  explicit PendingFrame(OutFrame frame);

  /// Writes what the socket takes. True when all of it went out; an error is left to the next
  /// write, which meets it again.
  bool write_to(int fd);

  /// What one uv_write is to write next. The memory is the frame's.
  std::vector<uv_buf_t> next_pieces() const;
  void wrote(size_t bytes) { written_ += bytes; }
  bool done() const { return written_ == total_; }

 private:
  template <class Add>
  void for_each_left(Add add) const;

  OutFrame frame_;
  uint8_t head_[wire::kHeaderBytes];
  size_t total_ = 0;
  size_t written_ = 0;
};

}  // namespace distrain::net
