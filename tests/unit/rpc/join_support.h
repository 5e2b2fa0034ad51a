// Ranks that join: an agent on its own thread, and a rank that the test implements with frames.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "distrain/net/socket.h"
#include "distrain/wire/frame.h"
#include "distrain/wire/handshake.h"
#include "gate.h"
#include "identity/handshake.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing {

using namespace std::chrono_literals;

inline void setup(rpc::Agent& agent) {
  agent.expose<&add>("add");
  agent.expose<&nap>("nap");
}

/// Returns the body of kPrepared of a rank without devices.
inline wire::Bytes no_devices() {
  wire::Bytes bytes;
  wire::Writer out(bytes);
  encode(wire::RankDevices{}, out);
  return bytes;
}

inline rpc::AgentOptions options_for(int rank, int world_size, uint16_t port = 0) {
  rpc::AgentOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.master_port = port;
  // Long limits, so that a slow machine loses no rank. A test of the limits sets its own.
  options.join_timeout = 60s;
  options.peer_timeout = 0s;
  if (rank == 0) {
    for (int r = 0; r < world_size; ++r) options.names.push_back("w" + std::to_string(r));
  }
  return options;
}

// Runs join() of a rank on its own thread and keeps the result.
class Joining {
 public:
  explicit Joining(rpc::AgentOptions options, std::function<void()> prepare = {}) {
    agent_ = std::make_unique<rpc::Agent>(std::move(options));
    setup(*agent_);
    done_ = std::async(std::launch::async, [this, prepare = std::move(prepare)] {
      return error_of([&] { agent_->join(prepare); });
    });
  }
  /// Returns kind internal and the message "(no error)" if the rank has joined.
  base::Error result() {
    if (!result_) result_ = done_.get();
    return *result_;
  }
  bool joined() { return result().message == "(no error)"; }
  bool ended() const { return result_ || done_.wait_for(0s) == std::future_status::ready; }
  rpc::Agent& agent() { return *agent_; }
  void kill() { agent_.reset(); }

 private:
  std::unique_ptr<rpc::Agent> agent_;
  std::future<base::Error> done_;
  std::optional<base::Error> result_;
};

// A rank that the test implements: it sends frames over a blocking socket.
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
  /// Returns the next frame, or nullopt if the peer has closed or is silent for 60 s.
  std::optional<std::pair<wire::FrameHeader, wire::Bytes>> receive() {
    uint8_t head[wire::kHeaderBytes];
    if (!receive_bytes(head, sizeof head)) return std::nullopt;
    const wire::FrameHeader header = wire::decode_header(head, wire::Limits{}).value();
    wire::Bytes body(header.body_bytes());
    if (!receive_bytes(body.data(), body.size())) return std::nullopt;
    return std::pair(header, body);
  }
  bool closed_by_peer() {
    while (receive()) {
    }
    pollfd entry{fd_.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  /// Authenticates as the connecting side. Returns false if the peer refuses.
  bool introduce(int rank, wire::HelloPurpose purpose, const std::string& secret = {}) {
    rpc::identity::Initiator initiator({{rank, wire::Trust::kSameUser, 0, {}}, secret}, purpose);
    send(wire::FrameKind::kHello, initiator.hello());
    if (!hear(wire::FrameKind::kHello)) return false;
    send_proof(initiator.answer(heard));
    if (!hear(wire::FrameKind::kProof)) return false;
    initiator.check(heard);
    return true;
  }
  void join(int rank) {
    CHECK(introduce(rank, wire::HelloPurpose::kJoin));
    send(wire::FrameKind::kJoin, wire::encode(wire::Join{"distrain", 0, {}, {}}));
    CHECK(hear(wire::FrameKind::kJoined));
  }
  /// Authenticates as rank 0 to a joining rank, whose Join it returns, and assigns `place` or, by
  /// default, the rank's own number.
  wire::Join be_joined(std::optional<uint64_t> place = {}) {
    REQUIRE(hear(wire::FrameKind::kHello));
    const wire::Hello hello = wire::decode_hello(heard);
    const rpc::identity::Responder responder({{0, wire::Trust::kSameUser, 0, {}}, {}}, hello);
    send(wire::FrameKind::kHello, responder.hello());
    REQUIRE(hear(wire::FrameKind::kProof));
    send_proof(responder.check(heard));
    REQUIRE(hear(wire::FrameKind::kJoin));
    send(wire::FrameKind::kJoined, {}, place.value_or(static_cast<uint64_t>(hello.rank)));
    return wire::decode_join(heard);
  }
  /// The body of the last frame.
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
  net::Fd fd_;
};

// Waits until rank 0 has handled all earlier frames and disconnects. Its loop reads earlier frames
// no later than the probe, and notices closed connections one iteration later.
inline void let_rank_0_catch_up(uint16_t port) {
  RawRank probe(port);
  probe.send(wire::FrameKind::kPrepared, no_devices());  // invalid here: rank 0 closes
  CHECK(probe.closed_by_peer());
}

// A bound port without a listener: it refuses connections and no other process gets it while the
// socket is open. Rank 0 may listen on it, because both sockets set SO_REUSEADDR.
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

// Checks that the job starts normally with rank 1 after the faults that rank 0 has survived.
inline void check_comes_up(Joining& zero) {
  Joining one(options_for(1, 2, zero.agent().port()));
  CHECK(one.joined());
  CHECK(zero.joined());
  if (!one.joined() || !zero.joined()) return;
  CHECK(zero.agent().rpc_sync<&add>(1, 2, 3) == 5);
  std::thread other([&] { one.agent().shutdown(); });
  zero.agent().shutdown();
  other.join();
}

}  // namespace distrain::testing
