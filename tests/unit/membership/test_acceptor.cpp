// ctest: labels=net
#include <atomic>
#include <thread>

#include <sys/resource.h>

#include "control_protocol.h"
#include "handshake.h"
#include "support/catch.h"
#include "support/raw_rank.h"

namespace distrain::testing {

namespace {

using membership::Acceptor;

// Returns callbacks that authenticate ranks with `secret` and then refuse them with "heard".
Acceptor::Callbacks expects(const std::string& secret) {
  Acceptor::Callbacks callbacks;
  callbacks.credentials = [secret](wire::HelloPurpose) {
    return membership::Credentials{{0, wire::Trust::kSameUser, 0, {}}, secret};
  };
  callbacks.admit = [](const net::StreamPtr&, const Acceptor::AuthenticatedPeer&) {
    return membership::rendezvous_error("heard");
  };
  return callbacks;
}

struct Door {
  explicit Door(base::Duration patience)
      : acceptor(std::make_shared<Acceptor>(loop, patience, expects("the secret"))) {
    net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
    port = net::local_name(socket.get()).port;
    acceptor->listen(std::move(socket));
  }
  ~Door() { acceptor->close(); }

  net::Loop loop;
  std::shared_ptr<Acceptor> acceptor;
  uint16_t port = 0;
};

// Returns true if the acceptor authenticates `rank`, whose connection it then refuses.
bool is_heard_as_peer(RawRank& rank) {
  if (!rank.introduce(1, wire::HelloPurpose::kPeer, "the secret")) return false;
  const auto answer = rank.receive();
  return answer && answer->first.kind == wire::FrameKind::kReject &&
         wire::decode_error(answer->second).message == "heard";
}

}  // namespace

TEST_CASE("a hello that arrived while the process was stopped is handled when it continues") {
  bool is_heard = false;
  for (const auto patience : {100ms, 2000ms, 8000ms}) {  // increases for slow machines
    Door door(patience);
    RawRank slow(door.port);
    RawRank quick(door.port);
    REQUIRE(is_heard_as_peer(quick));  // ensures that the loop has accepted both connections
    std::atomic<bool> is_stopped = false;
    std::atomic<bool> goes_on = false;
    door.loop.post([&] {
      is_stopped = true;
      is_stopped.notify_one();
      goes_on.wait(false);
    });
    is_stopped.wait(false);
    membership::Initiator initiator({{2, wire::Trust::kSameUser, 0, {}}, "the secret"},
                                    wire::HelloPurpose::kPeer);
    slow.send(wire::FrameKind::kHello, initiator.hello());
    std::this_thread::sleep_for(patience + 20ms);
    goes_on = true;
    goes_on.notify_one();
    const auto answer = slow.receive();
    is_heard = answer && answer->first.kind == wire::FrameKind::kHello;
    if (is_heard) break;
  }
  CHECK(is_heard);
}

TEST_CASE("when all places are taken, the oldest unauthenticated connection is closed") {
  Door door(600s);
  std::vector<RawRank> strangers;
  for (int i = 0; i < 200; ++i) strangers.emplace_back(door.port);
  RawRank rank(door.port);
  CHECK(is_heard_as_peer(rank));
  CHECK(strangers.front().closed_by_peer());
}

TEST_CASE("unauthenticated connections use at most a quarter of the descriptors") {
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{64, before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  {
    Door door(600s);
    std::vector<RawRank> strangers;
    for (int i = 0; i < 17; ++i) strangers.emplace_back(door.port);
    CHECK(strangers.front().closed_by_peer());
    CHECK(is_heard_as_peer(strangers.back()));
  }
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST_CASE("a connection that does not authenticate in time is closed") {
  Door door(200ms);
  RawRank silent(door.port);
  CHECK(silent.closed_by_peer());
  RawRank half(door.port);
  membership::Initiator initiator({{2, wire::Trust::kSameUser, 0, {}}, "the secret"},
                                  wire::HelloPurpose::kPeer);
  half.send(wire::FrameKind::kHello, initiator.hello());
  CHECK(half.closed_by_peer());
}

}  // namespace distrain::testing
