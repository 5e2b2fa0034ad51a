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
// Bytes of small frames between two parts of frames in segments.
constexpr size_t kMostOvertaking = wire::kSegmentBytes;

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

PendingFrame::PendingFrame(OutFrame frame, SendArena* arena) : frame_(std::move(frame)) {
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
  } else {
    header.in_segments =
        header.payload_bytes > wire::kSegmentBytes && header.kind != wire::FrameKind::kChunk;
  }
  if (attached.autograd_id != 0) {
    wire::encode_header(attached, std::span(head_).first<wire::kHeaderBytes>());
    head_bytes_ = sizeof head_;
  }
  wire::encode_header(header, std::span<uint8_t, wire::kHeaderBytes>(
                                  head_ + head_bytes_ - wire::kHeaderBytes, wire::kHeaderBytes));
  total_ += head_bytes_;
  part_end_ = total_;
  if (!header.in_segments) return;
  part_end_ = head_bytes_ + header.part_bytes();
  total_ += (header.payload_bytes - 1) / wire::kSegmentBytes * wire::kHeaderBytes;
}

void PendingFrame::begin_segment() {
  body_begin_ += part_end_ - part_begin_ - head_bytes_;
  part_begin_ = std::exchange(part_end_, next_part_end());
  head_bytes_ = wire::kHeaderBytes;
  wire::encode_header({.kind = wire::FrameKind::kSegment,
                       .payload_bytes = part_end_ - part_begin_ - wire::kHeaderBytes,
                       .call_id = body_begin_ - frame_.header.payload_offset()},
                      std::span(head_).first<wire::kHeaderBytes>());
}

void PendingFrame::copy_payload(uint8_t* to) {
  for (const auto& piece : frame_.payload) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
  frame_.payload.clear();
  frame_.keep_alive = nullptr;
}

// Calls `add` with each unwritten piece, up to `kMaxPieces`, also with those of later parts.
template <class Add>
void PendingFrame::for_each_left(Add add) const {
  size_t skip = written_ - part_begin_;
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
  skip += body_begin_;
  visit(frame_.meta_bytes().data(), frame_.meta_bytes().size());
  const size_t pad = frame_.header.payload_offset() - frame_.header.meta_bytes;
  if (pad > 0 && !frame_.payload.empty()) visit(kZeros, pad);
  for (const auto& piece : frame_.payload) visit(piece.data(), piece.size());
}

int PendingFrame::write_to(int fd, size_t limit) {
  if (written_ == part_end_ && !done()) begin_segment();
  limit = std::min(limit, part_end_ - written_);
  while (written_ < part_end_) {
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
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    written_ += static_cast<size_t>(sent);
    if (static_cast<size_t>(sent) == bytes) return 0;
    limit = std::min(limit, part_end_ - written_);
  }
  return 0;
}

// ---- SendQueue ----

bool SendQueue::must_follow_large(const wire::FrameHeader& header) const {
  using enum wire::FrameKind;
  switch (header.kind) {
    case kOneway:
      return std::any_of(large_.rbegin(), large_.rend(), [&](const auto& frame) {
        return frame->header().kind == kOneway && frame->header().channel == header.channel;
      });
    case kCancel:
    case kRRefDelete:
    case kLeave:
      return !large_.empty();
    default:
      return false;
  }
}

void SendQueue::push(std::unique_ptr<PendingFrame> frame) {
  frame->number = ++pushed_;
  const bool is_large = frame->in_segments() || must_follow_large(frame->header());
  (is_large ? large_ : small_).push_back(std::move(frame));
}

SendQueue::Lane* SendQueue::choose() {
  if (large_.empty()) return small_.empty() ? nullptr : &small_;
  if (small_.empty()) return &large_;
  const PendingFrame& large = *large_.front();
  const bool is_older = small_.front()->number < large.number;
  // A small frame in the large lane waits for older frames only.
  if (!large.in_segments()) return is_older ? &small_ : &large_;
  if (large.is_at_last_part() && is_older) return &small_;
  return overtaken_ < kMostOvertaking ? &small_ : &large_;
}

PendingFrame* SendQueue::next() {
  if (lane_ && lane_->front()->is_inside_part()) return lane_->front().get();
  if (lane_ == &large_ && large_.front()->bytes_left() < left_) overtaken_ = 0;
  lane_ = choose();
  if (!lane_) return nullptr;
  left_ = lane_->front()->bytes_left();
  return lane_->front().get();
}

std::unique_ptr<PendingFrame> SendQueue::pop() {
  overtaken_ = lane_ == &large_ || large_.empty() ? 0 : overtaken_ + left_;
  std::unique_ptr<PendingFrame> frame = std::move(lane_->front());
  std::exchange(lane_, nullptr)->pop_front();
  return frame;
}

SendQueue::Lanes SendQueue::take_all() {
  lane_ = nullptr;
  return {std::exchange(small_, {}), std::exchange(large_, {})};
}

}  // namespace distrain::net
