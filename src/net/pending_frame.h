#pragma once

#include <vector>

#include <uv.h>

#include "distrain/net/stream.h"

namespace distrain::net {

/// An outgoing frame with its encoded header and the number of bytes written so far.
class PendingFrame {
 public:
  explicit PendingFrame(OutFrame frame);

  /// Writes until about `limit` bytes are written. Returns false if the socket takes no more for
  /// now or has failed; the next write meets the error again.
  bool write_to(int fd, size_t limit);

  /// Returns the pieces for the next uv_write(). They point into the frame.
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
