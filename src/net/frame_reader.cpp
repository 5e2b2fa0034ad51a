#include "frame_reader.h"

#include <cerrno>
#include <cstring>

#include <sys/socket.h>

namespace distrain::net {

base::BufferPtr owner_of(base::BufferPtr body, base::BufferPtr payload) {
  const auto both = std::make_shared<std::pair<base::BufferPtr, base::BufferPtr>>(
      std::move(body), std::move(payload));
  return {both, both->first.get()};
}

void fail_attached() {
  throw base::Exception(base::ErrorKind::kProtocol, "shared memory that is not as agreed");
}

std::optional<int> FrameReader::read(Loop::Impl& loop, int fd, size_t most) {
  for (size_t taken = 0; taken < most;) {
    const std::span<uint8_t> scratch = loop.scratch_on_loop();
    std::copy_n(head_.begin(), head_filled_, scratch.begin());
    const std::span<uint8_t> room = room_.empty() ? scratch.subspan(head_filled_) : room_;
    const ssize_t bytes = receive(fd, room);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return std::nullopt;
    if (bytes <= 0) return bytes < 0 ? errno : 0;
    const bool is_empty = static_cast<size_t>(bytes) < room.size();
    taken += static_cast<size_t>(bytes);
    if (is_stopped_) {
      descriptors_.clear();
      continue;
    }
    take_bytes(loop, static_cast<size_t>(bytes));
    // The peer's proof and the first frame with a descriptor may come in one read.
    if (!takes_descriptors || is_stopped_) descriptors_.clear();
    if (descriptors_.size() > 1) {
      throw base::Exception(base::ErrorKind::kProtocol, "descriptors that no frame announces");
    }
    if (is_empty || is_stopped_) return std::nullopt;
  }
  return std::nullopt;
}

void FrameReader::stop() {
  is_stopped_ = true;
  body_ = in_arena_ = nullptr;
  attached_ = nullptr;
  descriptors_.clear();
  room_ = {};
  head_filled_ = 0;
}

ssize_t FrameReader::receive(int fd, std::span<uint8_t> bytes) {
  iovec piece{bytes.data(), bytes.size()};
  alignas(cmsghdr) uint8_t control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t received = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (received <= 0) return received;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= head->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int value = -1;
      std::memcpy(&value, CMSG_DATA(head) + at, sizeof value);
      descriptors_.push_back(std::make_shared<const Fd>(value));
    }
  }
  return received;
}

// Takes `bytes` that were read into `room_`, or else behind head_ in the scratch buffer.
void FrameReader::take_bytes(Loop::Impl& loop, size_t bytes) {
  last_heard = base::Clock::now();
  if (!room_.empty()) {
    loop.note_activity_on_loop();
    room_ = room_.subspan(bytes);
    if (room_.empty()) end_frame(loop);
    return;
  }
  const size_t have = std::exchange(head_filled_, 0) + bytes;
  std::span<const uint8_t> unread = loop.scratch_on_loop().first(have);
  while (!is_stopped_ && consume(loop, unread)) {
  }
}

// Takes the available bytes of a frame from `unread`. Returns false if more must be read first.
bool FrameReader::consume(Loop::Impl& loop, std::span<const uint8_t>& unread) {
  if (unread.size() < wire::kHeaderBytes) {
    head_filled_ = unread.size();
    std::copy(unread.begin(), unread.end(), head_.begin());
    return false;
  }
  header_ = wire::decode_header(unread.first<wire::kHeaderBytes>(), limits).value();
  begin_frame(loop);
  const size_t taken = std::min(unread.size() - wire::kHeaderBytes, room_.size());
  if (taken > 0) std::memcpy(room_.data(), unread.data() + wire::kHeaderBytes, taken);
  room_ = room_.subspan(taken);
  unread = unread.subspan(wire::kHeaderBytes + taken);
  if (!room_.empty()) return false;
  end_frame(loop);
  return !unread.empty();
}

void FrameReader::begin_frame(Loop::Impl& loop) {
  using enum wire::FrameKind;
  uint64_t bytes = header_.bytes_behind();
  if (header_.kind == kAttached || header_.kind == kArena) {
    if (!takes_descriptors || bytes > 0 || header_.in_bulk) fail_attached();
  } else {
    body_ = callbacks_.allocate(header_);
  }
  if (slot_) {
    if (!arena || header_.kind == kChunk || header_.in_bulk) fail_attached();
    in_arena_ = arena->take(*slot_, header_.payload_bytes).value();
    slot_.reset();
    body_ = nullptr;
    bytes = header_.meta_bytes;
  }
  if (!body_) body_ = loop.buffers.allocate(bytes);
  if (!body_) {
    throw base::Exception(base::ErrorKind::kResources,
                          "no memory for a message of " + std::to_string(bytes) + " bytes");
  }
  room_ = {body_->data, bytes};
}

void FrameReader::end_frame(Loop::Impl& loop) {
  // After activity the loop polls. It does not poll after a heartbeat, because nothing follows at
  // once, and rank 0 would always keep a core busy.
  if (header_.kind != wire::FrameKind::kHeartbeat) loop.note_activity_on_loop();
  InFrame frame{header_, {}, {}, std::exchange(body_, nullptr), std::exchange(attached_, nullptr)};
  frame.meta = {frame.body->data, header_.meta_bytes};
  if (in_arena_) {
    frame.payload = {in_arena_->data, header_.payload_bytes};
    frame.is_shared = true;
    frame.body = owner_of(std::move(frame.body), std::exchange(in_arena_, nullptr));
  } else if (!header_.in_bulk) {
    frame.payload = {frame.body->data + header_.payload_offset(), header_.payload_bytes};
  }
  if (header_.kind == wire::FrameKind::kAttached) return take_attached();
  callbacks_.deliver(std::move(frame));
}

void FrameReader::take_attached() {
  if (slot_ || attached_ || header_.autograd_id == 0 || header_.autograd_id > 3) fail_attached();
  if (header_.autograd_id & wire::kInSlot) {
    if (header_.call_id >= kArenaSlots) fail_attached();
    slot_ = {static_cast<uint32_t>(header_.call_id), header_.context_id};
  }
  if (header_.autograd_id & wire::kWithDescriptor) {
    if (descriptors_.size() != 1) fail_attached();
    attached_ = std::move(descriptors_.front());
    descriptors_.clear();
  }
}

}  // namespace distrain::net
