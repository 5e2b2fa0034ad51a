// ctest: timeout=180
// Tests that a peer is lost if it is silent or sends garbage, but not if it is idle.
#include <chrono>
#include <optional>
#include <thread>

#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::AgentOptions;

namespace {

// A rank 1 that has joined rank 0 and whose messages the test sends.
struct RawPeer {
  RawRank control;
  RawRank calls;
  std::string secret;
  std::optional<RawRank> bulk;
};

RawPeer join_by_hand(Joining& zero, bool opens_bulk_first = false) {
  const uint16_t port = zero.agent().port();
  RawRank control(port);
  control.join(1);
  const auto first = control.receive();
  REQUIRE(first);
  CHECK(first->first.kind == wire::FrameKind::kDirectory);
  const wire::Directory directory = wire::decode_directory(first->second);
  CHECK(directory.ranks.size() == 2);
  control.send(wire::FrameKind::kPrepared, no_devices());
  auto go = control.receive();
  while (go && go->first.kind == wire::FrameKind::kHeartbeat) go = control.receive();
  REQUIRE(go);
  CHECK(go->first.kind == wire::FrameKind::kGo);
  REQUIRE(zero.joined());
  std::optional<RawRank> bulk;
  if (opens_bulk_first) {
    bulk.emplace(port);
    CHECK(bulk->introduce(1, wire::HelloPurpose::kBulk, directory.secret));
  }
  RawRank calls(port);
  CHECK(calls.introduce(1, wire::HelloPurpose::kPeer, directory.secret));
  return {std::move(control), std::move(calls), directory.secret, std::move(bulk)};
}

}  // namespace

TEST_CASE("a peer that is connected but silent is lost after peer_timeout") {
  AgentOptions options = options_for(0, 2);
  options.peer_timeout = 500ms;
  Joining zero(options);
  const auto began = std::chrono::steady_clock::now();
  // Rank 1 sends nothing after it has joined.
  auto [control, peer, secret, bulk] = join_by_hand(zero);
  const base::Error e =
      error_of([&] { zero.agent().rpc_sync<&add>(rpc::To(1).without_deadline(), 1, 2); });
  const auto took = std::chrono::steady_clock::now() - began;
  CHECK(e.kind == ErrorKind::kPeerLost);
  CHECK(e.rank == 1);
  CHECK(contains(e.message, "silent"));
  CHECK(took > 300ms);
  CHECK(took < 60s);
  // Rank 0 sent heartbeats to the peer.
  bool heartbeat = false;
  while (const auto frame = peer.receive()) {
    heartbeat = heartbeat || frame->first.kind == wire::FrameKind::kHeartbeat;
  }
  CHECK(heartbeat);
  CHECK(error_of([&] { zero.agent().shutdown(); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("a connected peer that sends garbage is lost") {
  Joining zero(options_for(0, 2));
  auto [control, peer, secret, bulk] = join_by_hand(zero);
  auto call = zero.agent().rpc_async<&add>(rpc::To(1).without_deadline(), 1, 2);
  SECTION("an invalid frame") {
    const std::string garbage(200, 'x');
    peer.send_bytes(garbage.data(), garbage.size());
  }
  SECTION("a frame out of place") { peer.send(wire::FrameKind::kDirectory); }
  SECTION("an error that cannot be decoded") { peer.send(wire::FrameKind::kAbort, {1, 2}); }
  SECTION("an RRef of a rank that does not exist") {
    wire::FrameHeader header;
    header.kind = wire::FrameKind::kRRefFork;
    header.autograd_id = 99;
    uint8_t head[wire::kHeaderBytes];
    wire::encode_header(header, head);
    peer.send_bytes(head, sizeof head);
  }
  SECTION("endless references to values that no rank creates") {
    wire::FrameHeader header;
    header.kind = wire::FrameKind::kRRefFork;
    header.autograd_id = 1;
    for (uint64_t id = 1; id <= (1 << 18) + 1; ++id) {
      header.call_id = header.context_id = id;
      uint8_t head[wire::kHeaderBytes];
      wire::encode_header(header, head);
      peer.send_bytes(head, sizeof head);
    }
  }
  const base::Error e = error_of([&] { call.wait(); });
  CHECK(e.kind == ErrorKind::kProtocol);
  CHECK(e.rank == 1);
}

TEST_CASE("a rank that breaks its bulk connection is lost") {
  Joining zero(options_for(0, 2));
  auto [control, peer, secret, bulk] = join_by_hand(zero, GENERATE(false, true));
  auto call = zero.agent().rpc_async<&add>(rpc::To(1).without_deadline(), 1, 2);
  if (!bulk) {
    bulk.emplace(zero.agent().port());
    CHECK(bulk->introduce(1, wire::HelloPurpose::kBulk, secret));
  }
  RawRank second(zero.agent().port());
  CHECK(second.introduce(1, wire::HelloPurpose::kBulk, secret));
  CHECK(second.closed_by_peer());
  uint8_t head[wire::kHeaderBytes];
  wire::encode_header(
      {.kind = wire::FrameKind::kOneway, .payload_bytes = wire::kLeastInBulk, .in_bulk = true},
      head);
  peer.send_bytes(head, sizeof head);
  bulk->send_bytes(head, sizeof head);
  bulk.reset();
  const base::Error e = error_of([&] { call.wait(); });
  CHECK(e.kind == ErrorKind::kPeerLost);
  CHECK(e.rank == 1);
  CHECK(contains(e.message, "bulk"));
}

TEST_CASE("calls that cannot be decoded are answered with an error") {
  Joining zero(options_for(0, 2));
  auto [control, peer, secret, bulk] = join_by_hand(zero);
  for (const wire::Bytes& meta : {wire::Bytes{}, wire::Bytes{255, 255, 255, 255},
                                  wire::Bytes{0, 0, 0, 0}, wire::Bytes(64, 7)}) {
    peer.send(wire::FrameKind::kCall, meta);
    for (;;) {
      const auto answer = peer.receive();
      REQUIRE(answer);
      if (answer->first.kind == wire::FrameKind::kHeartbeat) continue;
      if (answer->first.kind == wire::FrameKind::kCredit) continue;
      if (answer->first.kind == wire::FrameKind::kSmallCredit) continue;
      CHECK(answer->first.kind == wire::FrameKind::kError);
      const base::Error e = wire::decode_error(answer->second);
      CHECK((e.kind == ErrorKind::kProtocol || e.kind == ErrorKind::kNotFound));
      break;
    }
  }
}

TEST_CASE("heartbeats keep idle connections alive") {
  AgentOptions options;
  options.peer_timeout = 3s;  // longer than a busy machine delays any rank
  Cluster cluster(3, setup, options);
  std::this_thread::sleep_for(4s);
  // Rank 1 sends heartbeats while a handler runs longer than the timeout.
  cluster[0].rpc_sync<&nap>(1, 4000);
  for (int rank = 0; rank < 3; ++rank)
    CHECK(cluster[rank].rpc_sync<&add>((rank + 1) % 3, 1, 1) == 2);
  cluster.shutdown();
}

TEST_CASE("layers are notified of a loss while all workers are busy") {
  struct Watch final : rpc::Layer {
    void on_rank_lost(const rpc::Loss& loss) override { lost = loss.rank; }
    std::atomic<int> lost{-1};
  };
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(3, setup, options);
  const auto watch = std::make_shared<Watch>();
  cluster[1].add_layer(watch);
  cluster[1].expose<&wait_at_gate>("wait_at_gate");
  g_gate = false;
  auto held_up = cluster[1].rpc_async<&wait_at_gate>(1);
  wait_for_call_at_gate();
  cluster.kill(2);
  const base::TimePoint deadline = base::deadline_after(60s);
  while (watch->lost < 0 && base::Clock::now() < deadline) std::this_thread::sleep_for(1ms);
  CHECK(watch->lost == 2);
  g_gate = true;
  held_up.wait();
}
