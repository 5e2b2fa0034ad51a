// Fuzz target for net::Stream: sends arbitrary bytes in pieces, and the payloads that they announce
// over a bulk connection, and checks the received frames.
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

constexpr wire::Limits kLimits{1 << 12, 16, 2 * wire::kLeastInBulk};
constexpr int kMostInBulk = 4;  // payloads, in an input
constexpr size_t kPieces[] = {1, 7, 47, 48, 49, 1000, 1 << 16};

struct Frame {
  std::array<uint8_t, wire::kHeaderBytes> header;
  Bytes meta;
  Bytes payload;
  friend auto operator<=>(const Frame&, const Frame&) = default;
};

struct Received {
  std::vector<Frame> frames;
  base::ErrorKind end = base::ErrorKind::kInternal;
  Bytes bulk = {};  // the payloads that the frames announce
};

// Parses the bytes without a connection. Returns the frames that a stream must deliver for them, if
// their payloads in bulk come.
Received parse(Input bytes) {
  Received all;
  while (bytes.size() >= wire::kHeaderBytes) {
    const auto header = wire::decode_header(bytes.first<wire::kHeaderBytes>(), kLimits);
    if (!header.ok()) {
      all.end = header.error().kind;
      return all;
    }
    bytes = bytes.subspan(wire::kHeaderBytes);
    wire::FrameHeader head = header.value();
    const bool is_chunk_in_bulk = head.in_bulk && head.kind == wire::FrameKind::kChunk;
    // This stream shares no memory.
    const bool is_shared =
        head.kind == wire::FrameKind::kArena || head.kind == wire::FrameKind::kAttached;
    if (is_shared || (is_chunk_in_bulk && bytes.size() >= head.meta_bytes)) {
      all.end = base::ErrorKind::kProtocol;
      return all;
    }
    if (bytes.size() < head.bytes_behind()) break;
    Frame frame;
    const Input meta = bytes.first(head.meta_bytes);
    frame.meta.assign(meta.begin(), meta.end());
    if (head.in_bulk) {
      frame.payload.resize(head.payload_bytes, static_cast<uint8_t>(all.frames.size() + 1));
      all.bulk.insert(all.bulk.end(), frame.payload.begin(), frame.payload.end());
    } else {
      const Input payload = bytes.subspan(head.payload_offset(), head.payload_bytes);
      frame.payload.assign(payload.begin(), payload.end());
    }
    bytes = bytes.subspan(head.bytes_behind());
    head.in_bulk = false;
    encode_header(head, frame.header);
    all.frames.push_back(std::move(frame));
  }
  all.end = base::ErrorKind::kPeerLost;  // the bytes may end within a frame
  return all;
}

void send_all(int fd, Input bytes, size_t piece) {
  while (!bytes.empty()) {
    const Input next = bytes.first(std::min(piece, bytes.size()));
    const ssize_t sent = send(fd, next.data(), next.size(), MSG_NOSIGNAL);
    if (sent <= 0) break;  // the stream has closed
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
}

Received receive(Input bytes, size_t piece, const Bytes& in_bulk) {
  static net::Loop loop, bulk_loop;
  int sockets[2], bulk[2];
  check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0 &&
            socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, bulk) == 0 &&
            fcntl(sockets[0], F_SETFL, O_NONBLOCK) == 0,
        "there are sockets");
  Received all;
  std::promise<void> closed;
  const net::StreamPtr stream = net::adopt_socket(loop, sockets[0]);
  loop.post([&] {
    stream->use_bulk_on_loop({});
    check(stream->receive_bulk_on_loop(bulk_loop, net::Fd(bulk[0])), "there is one");
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
  });
  send_all(sockets[1], bytes, piece);
  shutdown(sockets[1], SHUT_WR);
  send_all(bulk[1], in_bulk, size_t{1} << 20);
  closed.get_future().wait();
  close(sockets[1]);
  close(bulk[1]);
  return all;
}

// Corrects the hash in each header that begins with kMagic.
Bytes with_hashes(Bytes bytes) {
  std::span<uint8_t> rest(bytes);
  for (int in_bulk = 0; rest.size() >= wire::kHeaderBytes;) {
    wire::add_hash(rest);
    const auto header = wire::decode_header(rest.first<wire::kHeaderBytes>(), kLimits);
    if (!header.ok()) break;
    if (header.value().in_bulk && ++in_bulk > kMostInBulk) {
      bytes.resize(bytes.size() - rest.size());
      break;
    }
    rest = rest.subspan(std::min(rest.size(), wire::kHeaderBytes + header.value().bytes_behind()));
  }
  return bytes;
}

// The first byte of the input selects the length of the pieces. The rest is sent.
void run_stream(Input input) {
  if (input.empty()) return;
  const Bytes bytes = with_hashes(Bytes(input.begin() + 1, input.end()));
  Received right = parse(bytes);
  Received came = receive(bytes, kPieces[input[0] % std::size(kPieces)], right.bulk);
  check(came.end == right.end, "a stream ends for the same reason, whatever the pieces");
  if (right.bulk.empty()) {
    check(came.frames == right.frames, "a stream delivers what came, whatever the pieces");
    return;
  }
  // Some frames overtake those in bulk, which an error drops.
  std::ranges::sort(right.frames);
  std::ranges::sort(came.frames);
  check(right.end == base::ErrorKind::kPeerLost ? came.frames == right.frames
                                                : std::ranges::includes(right.frames, came.frames),
        "a stream delivers what came, in bulk too");
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
  Bytes bulk = {4};
  for (const auto kind : {kCall, kOneway}) {
    append({.kind = kind, .payload_bytes = wire::kLeastInBulk + 9, .call_id = 3, .in_bulk = true},
           bulk);
    append({.kind = kHeartbeat}, bulk);
    append({.kind = kOneway, .call_id = 4}, bulk);
    append({.kind = kCancel, .call_id = 3}, bulk);
  }
  return {frames, bulk};
}

}  // namespace

const Target kStream{"stream", run_stream, stream_seeds};

}  // namespace distrain::fuzz
