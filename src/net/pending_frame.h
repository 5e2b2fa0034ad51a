#pragma once

#include <vector>

#include <uv.h>

#include "distrain/net/stream.h"

namespace distrain::net {

/// A frame on its way out: its header encoded, and how much of it is written.
class PendingFrame {
 public:
  explicit PendingFrame(OutFrame frame);

  /// Writes what the socket takes, and not much more than `limit` bytes. False when it takes no
  /// more for now; an error is left to the next write, which meets it again.
  bool write_to(int fd, size_t limit);

  /// What one uv_write is to write next. The memory is the frame's.
  std::vector<uv_buf_t> next_pieces() const;
  void wrote(size_t bytes) { written_ += bytes; }
  bool done() const { return written_ == total_; }
  size_t bytes_left() const { return total_ - written_; }

 private:
  template <class Add>
  void for_each_left(Add add) const;

  OutFrame frame_;
  uint8_t head_[wire::kHeaderBytes];
  size_t total_ = 0;
  size_t written_ = 0;
};

}  // namespace distrain::net
