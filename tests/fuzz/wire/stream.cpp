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

constexpr wire::Limits kLimits{1 << 12, 16, 1 << 14};
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
  while (bytes.size() >= wire::kHeaderBytes) {
    Frame frame;
    std::copy_n(bytes.begin(), frame.header.size(), frame.header.begin());
    const auto header = wire::decode_header(frame.header, kLimits);
    if (!header.ok()) {
      all.end = header.error().kind;
      return all;
    }
    bytes = bytes.subspan(wire::kHeaderBytes);
    const wire::FrameHeader& head = header.value();
    if (head.kind == wire::FrameKind::kArena || head.kind == wire::FrameKind::kAttached) {
      all.end = base::ErrorKind::kProtocol;  // this stream shares no memory
      return all;
    }
    if (bytes.size() < head.body_bytes()) break;
    const Input meta = bytes.first(head.meta_bytes);
    const Input payload = bytes.subspan(head.payload_offset(), head.payload_bytes);
    frame.meta.assign(meta.begin(), meta.end());
    frame.payload.assign(payload.begin(), payload.end());
    all.frames.push_back(std::move(frame));
    bytes = bytes.subspan(head.body_bytes());
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

// Corrects the hash in each header that begins with kMagic.
void add_hashes(std::span<uint8_t> bytes) {
  while (bytes.size() >= wire::kHeaderBytes) {
    wire::add_hash(bytes);
    const auto header = wire::decode_header(bytes.first<wire::kHeaderBytes>(), kLimits);
    if (!header.ok() || bytes.size() - wire::kHeaderBytes < header.value().body_bytes()) return;
    bytes = bytes.subspan(wire::kHeaderBytes + header.value().body_bytes());
  }
}

// The first byte of the input selects the length of the pieces. The rest is sent.
void run_stream(Input input) {
  if (input.empty()) return;
  Bytes bytes(input.begin() + 1, input.end());
  add_hashes(bytes);
  check(receive(bytes, kPieces[input[0] % std::size(kPieces)]) == parse(bytes),
        "a stream delivers what came, whatever the pieces");
}

std::vector<Bytes> stream_seeds() {
  Bytes bytes = {2};
  for (const auto& [meta, payload] : {std::pair(0, 0), std::pair(30, 0), std::pair(5, 200)}) {
    const wire::FrameHeader header{.kind = wire::FrameKind::kCall,
                                   .meta_bytes = static_cast<uint32_t>(meta),
                                   .payload_bytes = static_cast<uint64_t>(payload),
                                   .call_id = 7};
    std::array<uint8_t, wire::kHeaderBytes> head;
    encode_header(header, head);
    std::memcpy(head.data(), &wire::kMagic, sizeof wire::kMagic);  // add_hashes() corrects the hash
    bytes.insert(bytes.end(), head.begin(), head.end());
    bytes.resize(bytes.size() + header.body_bytes(), 9);
  }
  return {bytes};
}

}  // namespace

const Target kStream{"stream", run_stream, stream_seeds};

}  // namespace distrain::fuzz
