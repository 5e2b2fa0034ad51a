// ctest: labels=net
#include <sys/resource.h>

#include "../src/rpc/control/doorway.h"
#include "../src/rpc/control/party.h"
#include "join_support.h"

namespace distrain::testing {

TEST_CASE("a hello that came while the process was stopped is heard when it goes on") {
  bool is_heard = false;
  for (const auto patience : {100ms, 2000ms, 8000ms}) {  // the loop is to be held up in time
    net::Loop loop;
    const auto door = std::make_shared<rpc::control::Doorway>(
        loop, patience, [](const net::StreamPtr&, const wire::Hello&) {
          return rpc::control::rendezvous_error("heard");
        });
    net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
    const uint16_t port = net::local_name(socket.get()).port;
    door->listen(std::move(socket));
    RawRank slow(port);
    RawRank quick(port);
    quick.hello(1, wire::HelloPurpose::kJoin);
    REQUIRE(quick.receive());  // so the loop has seen both connections
    std::atomic<bool> is_stopped = false;
    std::atomic<bool> goes_on = false;
    loop.post([&] {
      is_stopped = true;
      is_stopped.notify_one();
      goes_on.wait(false);
    });
    is_stopped.wait(false);
    slow.hello(2, wire::HelloPurpose::kJoin);
    std::this_thread::sleep_for(patience + 20ms);
    goes_on = true;
    goes_on.notify_one();
    const auto answer = slow.receive();
    is_heard = answer && answer->first.kind == wire::FrameKind::kReject;
    door->close();
    if (is_heard) break;
  }
  CHECK(is_heard);
}

TEST_CASE("strangers take a quarter of the descriptors at most") {
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{256, before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  net::Loop loop;
  const auto door = std::make_shared<rpc::control::Doorway>(
      loop, 600s, [](const net::StreamPtr&, const wire::Hello&) {
        return rpc::control::rendezvous_error("heard");
      });
  net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
  const uint16_t port = net::local_name(socket.get()).port;
  door->listen(std::move(socket));
  std::vector<RawRank> strangers;
  for (int i = 0; i < 65; ++i) strangers.emplace_back(port);
  CHECK(strangers.front().closed_by_peer());
  strangers.back().hello(1, wire::HelloPurpose::kJoin);
  CHECK(strangers.back().receive());
  door->close();
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace distrain::testing
