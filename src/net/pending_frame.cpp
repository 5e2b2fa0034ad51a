#include <algorithm>
#include <cerrno>

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "net_impl.h"

namespace distrain::net {
namespace {

constexpr size_t kMaxPieces = 512;                  // per gather-write; IOV_MAX is 1024
constexpr size_t kMaxPieceBytes = size_t{1} << 30;  // uv_buf_init() takes 32 bits
constexpr uint8_t kZeros[wire::kPayloadAlignment] = {};
constexpr wire::Limits kSendLimits;  // the defaults, which every receiver accepts

}  // namespace

uint64_t OutFrame::payload_bytes() const {
  uint64_t bytes = 0;
  for (const auto& piece : payload) bytes += piece.size();
  return bytes;
}

uint64_t bytes_of(const OutFrame& frame) {
  return frame.meta_bytes().size() + frame.payload_bytes();
}

base::Status check_limits(const OutFrame& frame) {
  if (frame.meta_bytes().size() <= kSendLimits.max_meta_bytes &&
      frame.header.tensor_count <= kSendLimits.max_tensors &&
      frame.payload_bytes() <= kSendLimits.max_payload_bytes) {
    return base::Unit{};
  }
  return base::Error{
      base::ErrorKind::kInvalid,
      fmt::format("a message beyond the limits: {} bytes besides the tensors' (at most {}), {} "
                  "tensors (at most {}) of at most {} bytes together",
                  frame.meta_bytes().size(), kSendLimits.max_meta_bytes, frame.header.tensor_count,
                  kSendLimits.max_tensors, kSendLimits.max_payload_bytes)};
}

PendingFrame::PendingFrame(OutFrame frame) : frame_(std::move(frame)) {
  wire::FrameHeader& header = frame_.header;
  header.meta_bytes = static_cast<uint32_t>(frame_.meta_bytes().size());
  header.payload_bytes = frame_.payload_bytes();
  wire::encode_header(header, head_);
  total_ = wire::kHeaderBytes + header.body_bytes();
}

// Calls `add` with each unwritten piece, up to `kMaxPieces`.
template <class Add>
void PendingFrame::for_each_left(Add add) const {
  size_t skip = written_;
  size_t count = 0;
  const auto visit = [&](const uint8_t* data, size_t size) {
    if (skip >= size) {
      skip -= size;
    } else if (count < kMaxPieces) {
      add(const_cast<uint8_t*>(data) + skip, size - skip);
      skip = 0;
      ++count;
    }
  };
  visit(head_, sizeof head_);
  visit(frame_.meta_bytes().data(), frame_.meta_bytes().size());
  const size_t pad = frame_.header.payload_offset() - frame_.header.meta_bytes;
  if (pad > 0) visit(kZeros, pad);
  for (const auto& piece : frame_.payload) visit(piece.data(), piece.size());
}

bool PendingFrame::write_to(int fd, size_t limit) {
  while (!done()) {
    iovec pieces[kMaxPieces];
    size_t count = 0;
    size_t bytes = 0;
    for_each_left([&](uint8_t* data, size_t size) {
      if (bytes >= limit) return;
      size = std::min(size, limit - bytes);
      pieces[count++] = iovec{data, size};
      bytes += size;
    });
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    wrote(static_cast<size_t>(sent));
    if (static_cast<size_t>(sent) == bytes) return true;
  }
  return true;
}

std::vector<uv_buf_t> PendingFrame::next_pieces() const {
  std::vector<uv_buf_t> pieces;
  for_each_left([&](uint8_t* data, size_t size) {
    pieces.push_back(uv_buf_init(reinterpret_cast<char*>(data),
                                 static_cast<unsigned>(std::min(size, kMaxPieceBytes))));
  });
  // Stop after a truncated piece, because its remaining bytes must be written before other pieces.
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].len == kMaxPieceBytes) pieces.resize(i + 1);
  }
  return pieces;
}

}  // namespace distrain::net
