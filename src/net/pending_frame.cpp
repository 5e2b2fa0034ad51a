#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "net_impl.h"

namespace distrain::net {
namespace {

constexpr size_t kMaxPieces = 512;  // per gather-write; IOV_MAX is 1024
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

PendingFrame::PendingFrame(OutFrame frame, SendArena* arena, bool has_bulk)
    : frame_(std::move(frame)), head_bytes_(wire::kHeaderBytes) {
  wire::FrameHeader& header = frame_.header;
  header.meta_bytes = static_cast<uint32_t>(frame_.meta_bytes().size());
  header.payload_bytes = frame_.payload_bytes();
  total_ = header.body_bytes();
  wire::FrameHeader attached{.kind = wire::FrameKind::kAttached};
  if (frame_.descriptor) attached.autograd_id |= wire::kWithDescriptor;
  if (const auto slot = arena ? arena->take(header.payload_bytes) : std::nullopt) {
    attached.autograd_id |= wire::kInSlot;
    attached.call_id = slot->number;
    attached.context_id = slot->offset;
    copy_payload(arena->at(*slot));
    total_ = header.meta_bytes;
  } else if (has_bulk && header.payload_bytes >= wire::kLeastInBulk &&
             header.kind != wire::FrameKind::kChunk) {
    header.in_bulk = true;
    total_ = header.meta_bytes;
  }
  if (attached.autograd_id != 0) {
    wire::encode_header(attached, std::span(head_).first<wire::kHeaderBytes>());
    head_bytes_ = sizeof head_;
  }
  wire::encode_header(header, std::span<uint8_t, wire::kHeaderBytes>(
                                  head_ + head_bytes_ - wire::kHeaderBytes, wire::kHeaderBytes));
  total_ += head_bytes_;
}

std::unique_ptr<PendingFrame> PendingFrame::take_bulk() {
  if (!frame_.header.in_bulk) return nullptr;
  std::unique_ptr<PendingFrame> bulk(new PendingFrame);
  bulk->frame_.payload = std::exchange(frame_.payload, {});
  bulk->frame_.keep_alive = std::exchange(frame_.keep_alive, nullptr);
  bulk->total_ = frame_.header.payload_bytes;
  return bulk;
}

void PendingFrame::copy_payload(uint8_t* to) {
  for (const auto& piece : frame_.payload) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
  frame_.payload.clear();
  frame_.keep_alive = nullptr;
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
  visit(head_, head_bytes_);
  visit(frame_.meta_bytes().data(), frame_.meta_bytes().size());
  const size_t pad = frame_.header.payload_offset() - frame_.header.meta_bytes;
  if (pad > 0 && !frame_.payload.empty()) visit(kZeros, pad);
  for (const auto& piece : frame_.payload) visit(piece.data(), piece.size());
}

int PendingFrame::write_to(int fd, size_t limit) {
  limit = std::min(limit, bytes_left());
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
    alignas(cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int))] = {};
    if (frame_.descriptor && written_ == 0) {  // it travels with the frame's first byte
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(sizeof(int));
      const int value = frame_.descriptor->get();
      std::memcpy(CMSG_DATA(head), &value, sizeof value);
    }
    const ssize_t sent = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno;
    written_ += static_cast<size_t>(sent);
    if (static_cast<size_t>(sent) == bytes) return 0;
    limit = std::min(limit, bytes_left());
  }
  return 0;
}

}  // namespace distrain::net
