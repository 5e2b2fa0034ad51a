// Fuzz target for net::Stream: sends arbitrary bytes in pieces and checks the received frames.
#include "distrain/net/stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <optional>

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../unit/wire/decoders.h"
#include "distrain/net/loop.h"
#include "targets.h"

namespace distrain::fuzz {

namespace {

constexpr wire::Limits kLimits{1 << 12, 16, 3 * wire::kSegmentBytes};
constexpr int kMostParts = 6;  // with segments, in an input
constexpr size_t kPieces[] = {1, 7, 47, 48, 49, 1000, 1 << 16};

struct Frame {
  std::array<uint8_t, wire::kHeaderBytes> header;
  Bytes meta;
  Bytes payload;
  friend bool operator==(const Frame&, const Frame&) = default;
};

struct Received {
  std::vector<Frame> frames;
  base::ErrorKind end = base::ErrorKind::kInternal;
  friend bool operator==(const Received&, const Received&) = default;
};

// Parses the bytes without a connection. Returns the frames that a stream must deliver for them.
Received parse(Input bytes) {
  Received all;
  wire::FrameHeader whole;  // of the frame whose payload comes in segments
  Bytes body;               // so far; empty: there is no such frame
  const auto add = [&](const wire::FrameHeader& head, Input of) {
    Frame& frame = all.frames.emplace_back();
    encode_header(head, frame.header);
    const Input meta = of.first(head.meta_bytes);
    const Input payload = of.subspan(head.payload_offset(), head.payload_bytes);
    frame.meta.assign(meta.begin(), meta.end());
    frame.payload.assign(payload.begin(), payload.end());
  };
  while (bytes.size() >= wire::kHeaderBytes) {
    const auto header = wire::decode_header(bytes.first<wire::kHeaderBytes>(), kLimits);
    if (!header.ok()) {
      all.end = header.error().kind;
      return all;
    }
    bytes = bytes.subspan(wire::kHeaderBytes);
    const wire::FrameHeader& head = header.value();
    bool is_wrong = head.kind == wire::FrameKind::kArena ||  // this stream shares no memory
                    head.kind == wire::FrameKind::kAttached || (head.in_segments && !body.empty());
    if (head.kind == wire::FrameKind::kSegment) {
      const uint64_t left = whole.body_bytes() - body.size();
      is_wrong = body.empty() ||
                 head != wire::FrameHeader{.kind = wire::FrameKind::kSegment,
                                           .payload_bytes = std::min(left, wire::kSegmentBytes),
                                           .call_id = whole.payload_bytes - left};
    }
    if (is_wrong) {
      all.end = base::ErrorKind::kProtocol;
      return all;
    }
    if (bytes.size() < head.part_bytes()) break;
    const Input part = bytes.first(head.part_bytes());
    bytes = bytes.subspan(part.size());
    if (head.in_segments) {
      whole = head;
      whole.in_segments = false;
      body.assign(part.begin(), part.end());
    } else if (head.kind == wire::FrameKind::kSegment) {
      body.insert(body.end(), part.begin(), part.end());
      if (body.size() < whole.body_bytes()) continue;
      add(whole, body);
      body.clear();
    } else {
      add(head, part);
    }
  }
  all.end = base::ErrorKind::kPeerLost;  // the bytes may end within a frame
  return all;
}

Received receive(Input bytes, size_t piece) {
  static net::Loop loop;
  int sockets[2];
  check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0, "there are sockets");
  check(fcntl(sockets[0], F_SETFL, O_NONBLOCK) == 0, "there are sockets");
  Received all;
  std::promise<void> closed;
  const net::StreamPtr stream = net::adopt_socket(loop, sockets[0]);
  stream->start({[&all](net::InFrame frame) {
                   Frame& next = all.frames.emplace_back();
                   encode_header(frame.header, next.header);
                   next.meta.assign(frame.meta.begin(), frame.meta.end());
                   next.payload.assign(frame.payload.begin(), frame.payload.end());
                 },
                 [&](const base::Error& error) {
                   all.end = error.kind;
                   closed.set_value();
                 }},
                kLimits);
  while (!bytes.empty()) {
    const Input next = bytes.first(std::min(piece, bytes.size()));
    const ssize_t sent = send(sockets[1], next.data(), next.size(), MSG_NOSIGNAL);
    if (sent <= 0) break;  // the stream has closed
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
  shutdown(sockets[1], SHUT_WR);
  closed.get_future().wait();
  close(sockets[1]);
  return all;
}

// Corrects the hash in each header that begins with kMagic, and adds the bytes of segments, which
// an input does not contain.
Bytes expand(Bytes input) {
  Bytes bytes;
  std::span<uint8_t> rest(input);
  const auto take = [&](size_t size) {
    bytes.insert(bytes.end(), rest.begin(), rest.begin() + static_cast<long>(size));
    rest = rest.subspan(size);
  };
  for (int parts = 0; rest.size() >= wire::kHeaderBytes;) {
    wire::add_hash(rest);
    const auto header = wire::decode_header(rest.first<wire::kHeaderBytes>(), kLimits);
    if (!header.ok()) break;
    const wire::FrameHeader& head = header.value();
    const bool is_part = head.in_segments || head.kind == wire::FrameKind::kSegment;
    if (is_part && ++parts > kMostParts) break;
    take(std::min(rest.size(), wire::kHeaderBytes + (is_part ? 0 : head.body_bytes())));
    if (is_part) bytes.resize(bytes.size() + head.part_bytes(), static_cast<uint8_t>(parts));
  }
  take(rest.size());
  return bytes;
}

// The first byte of the input selects the length of the pieces. The rest is sent.
void run_stream(Input input) {
  if (input.empty()) return;
  const Bytes bytes = expand(Bytes(input.begin() + 1, input.end()));
  const size_t shortest = bytes.size() / 1000;  // otherwise segments would take long
  const size_t piece = std::max(kPieces[input[0] % std::size(kPieces)], shortest);
  check(receive(bytes, piece) == parse(bytes), "a stream delivers what came, whatever the pieces");
}

void append(const wire::FrameHeader& header, Bytes& bytes) {
  std::array<uint8_t, wire::kHeaderBytes> head;
  encode_header(header, head);
  std::memcpy(head.data(), &wire::kMagic, sizeof wire::kMagic);  // expand() corrects the hash
  bytes.insert(bytes.end(), head.begin(), head.end());
}

std::vector<Bytes> stream_seeds() {
  using enum wire::FrameKind;
  Bytes frames = {2};
  for (const auto& [meta, payload] : {std::pair(0, 0), std::pair(30, 0), std::pair(5, 200)}) {
    const wire::FrameHeader header{.meta_bytes = static_cast<uint32_t>(meta),
                                   .payload_bytes = static_cast<uint64_t>(payload),
                                   .call_id = 7};
    append(header, frames);
    frames.resize(frames.size() + header.body_bytes(), 9);
  }
  constexpr uint64_t kPart = wire::kSegmentBytes;
  Bytes segments = {4};
  append({.meta_bytes = 30, .payload_bytes = 2 * kPart + 100, .call_id = 3, .in_segments = true},
         segments);
  append({.kind = kHeartbeat}, segments);
  append({.kind = kSegment, .payload_bytes = kPart, .call_id = kPart}, segments);
  append({.kind = kCancel, .call_id = 3}, segments);
  append({.kind = kSegment, .payload_bytes = 100, .call_id = 2 * kPart}, segments);
  append({.kind = kReply, .call_id = 5}, segments);
  return {frames, segments};
}

}  // namespace

const Target kStream{"stream", run_stream, stream_seeds};

}  // namespace distrain::fuzz
