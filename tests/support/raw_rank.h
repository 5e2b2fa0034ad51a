// A rank that a test implements: it sends frames over a blocking socket.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "distrain/net/socket.h"
#include "distrain/wire/frame.h"
#include "distrain/wire/handshake.h"
#include "proof.h"
#include "support/catch.h"

namespace distrain::testing {

using namespace std::chrono_literals;

/// Returns the body of the kPrepared frame that a rank without devices sends.
inline wire::Bytes no_devices() { return wire::encode(wire::RankDevices{}); }

class RawRank {
 public:
  explicit RawRank(uint16_t port)
      : RawRank(std::move(net::connect_tcp("localhost", port, base::deadline_after(60s)).value())) {
  }
  explicit RawRank(net::Fd connection) : fd_(std::move(connection)) {
    const int flags = fcntl(fd_.get(), F_GETFL);
    fcntl(fd_.get(), F_SETFL, flags & ~O_NONBLOCK);
  }
  void send_bytes(const void* data, size_t size) {
    const auto* at = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t sent = ::send(fd_.get(), at, size, MSG_NOSIGNAL);
      if (sent <= 0) return;
      at += sent;
      size -= static_cast<size_t>(sent);
    }
  }
  void send(wire::FrameKind kind, const wire::Bytes& meta = {}, uint64_t id = 0) {
    wire::FrameHeader header;
    header.kind = kind;
    header.call_id = id;
    header.meta_bytes = static_cast<uint32_t>(meta.size());
    uint8_t head[wire::kHeaderBytes];
    wire::encode_header(header, head);
    send_bytes(head, sizeof head);
    send_bytes(meta.data(), meta.size());
  }
  /// Returns false if the peer has disconnected or sends nothing for 60 s.
  bool receive_bytes(uint8_t* at, size_t size) {
    while (size > 0) {
      pollfd entry{fd_.get(), POLLIN, 0};
      if (::poll(&entry, 1, 60000) != 1) return false;
      const ssize_t got = ::recv(fd_.get(), at, size, 0);
      if (got <= 0) return false;
      at += got;
      size -= static_cast<size_t>(got);
    }
    return true;
  }
  /// Returns the next frame, or nullopt if the peer has disconnected or sends nothing for 60 s.
  std::optional<std::pair<wire::FrameHeader, wire::Bytes>> receive() {
    uint8_t head[wire::kHeaderBytes];
    if (!receive_bytes(head, sizeof head)) return std::nullopt;
    const wire::FrameHeader header = wire::decode_header(head, wire::Limits{}).value();
    wire::Bytes body(header.bytes_behind());
    if (!receive_bytes(body.data(), body.size())) return std::nullopt;
    return std::pair(header, std::move(body));
  }
  bool closed_by_peer() {
    while (receive()) {
    }
    pollfd entry{fd_.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  /// Authenticates as the connecting side. Returns false if the peer refuses.
  bool introduce(int rank, wire::HelloPurpose purpose, const std::string& secret = {}) {
    membership::Initiator initiator({{rank, wire::Trust::kSameUser, 0, {}}, secret}, purpose);
    send(wire::FrameKind::kHello, initiator.hello());
    if (!hear(wire::FrameKind::kHello)) return false;
    send_proof(initiator.answer(heard));
    if (!hear(wire::FrameKind::kProof)) return false;
    initiator.check(heard);
    return true;
  }
  void join(int rank, const wire::Endpoint& endpoint = {}) {
    CHECK(introduce(rank, wire::HelloPurpose::kJoin));
    send(wire::FrameKind::kJoin, wire::encode(wire::Join{"distrain", 0, endpoint, {}}));
    CHECK(hear(wire::FrameKind::kJoined));
  }
  /// Authenticates as the accepting side, as `rank`. Returns the other side's hello.
  wire::Hello be_met(int rank, const std::string& secret = {}) {
    REQUIRE(hear(wire::FrameKind::kHello));
    const wire::Hello hello = wire::decode_hello(heard);
    const membership::Responder responder({{rank, wire::Trust::kSameUser, 0, {}}, secret}, hello);
    send(wire::FrameKind::kHello, responder.hello());
    REQUIRE(hear(wire::FrameKind::kProof));
    send_proof(responder.check(heard));
    return hello;
  }
  /// Acts as rank 0 towards a joining rank: authenticates, assigns it rank `place` (default: the
  /// rank that it asks for) and returns its Join message.
  wire::Join be_joined(std::optional<uint64_t> place = {}) {
    const wire::Hello hello = be_met(0);
    REQUIRE(hear(wire::FrameKind::kJoin));
    send(wire::FrameKind::kJoined, {}, place.value_or(static_cast<uint64_t>(hello.rank)));
    return wire::decode_join(heard);
  }
  /// The body of the last frame that was received.
  wire::Bytes heard;

 private:
  bool hear(wire::FrameKind kind) {
    auto frame = receive();
    heard = frame ? std::move(frame->second) : wire::Bytes{};
    return frame && frame->first.kind == kind;
  }
  void send_proof(const wire::Proof& proof) {
    send(wire::FrameKind::kProof, {proof.begin(), proof.end()});
  }
  net::Fd fd_;
};

// Waits until rank 0 has handled all earlier frames and disconnections. Its loop reads the earlier
// frames before the frame of `probe`, and notices a disconnection one iteration after its frames.
inline void let_rank_0_catch_up(uint16_t port) {
  RawRank probe(port);
  probe.send(wire::FrameKind::kPrepared, no_devices());  // invalid here: rank 0 closes
  CHECK(probe.closed_by_peer());
}

// A bound port without a listener. The kernel refuses connections to the port and assigns it to no
// other process while the socket is open. Rank 0 can listen on it, because both set SO_REUSEADDR.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int one = 1;
    setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    sockaddr_in any_port{};
    any_port.sin_family = AF_INET;
    any_port.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&any_port), sizeof any_port) == 0);
  }
  uint16_t port() const { return net::local_name(socket_.get()).port; }

 private:
  net::Fd socket_;
};

}  // namespace distrain::testing
