// ctest: timeout=180
// Tests faults while the ranks of a job meet: strangers, and ranks that are missing or leave.
#include <thread>

#include <unistd.h>

#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;
using rpc::AgentOptions;

namespace {

// Options of rank 1 of three. If `rejoins`, it retries until rank 0 has noticed a former rank 1's
// end.
AgentOptions options_of_one(uint16_t port, bool rejoins) {
  AgentOptions options = options_for(1, 3, port);
  options.rejoins = rejoins;
  return options;
}

// Checks that ranks 1 and 2 of three can join rank 0 after a test's faults.
void check_three_join(Joining& zero, bool rejoins = false) {
  Joining one(options_of_one(zero.agent().port(), rejoins));
  Joining two(options_for(2, 3, zero.agent().port()));
  CHECK(one.joined());
  CHECK(two.joined());
  CHECK(zero.joined());
}

}  // namespace

TEST_CASE("rank 0 survives strangers of all kinds") {
  Joining zero(options_for(0, 2));
  const uint16_t port = zero.agent().port();
  {
    RawRank http(port);
    const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0\r\n\r\n";
    http.send_bytes(request.data(), request.size());
    CHECK(http.closed_by_peer());
  }
  {
    RawRank short_one(port);
    short_one.send_bytes("DT", 2);
  }
  {
    // Sends the header of a frame that claims to have 4 GiB of metadata.
    RawRank huge(port);
    wire::FrameHeader header;
    header.kind = wire::FrameKind::kHello;
    header.meta_bytes = 0xFFFFFFFF;
    uint8_t head[wire::kHeaderBytes];
    wire::encode_header(header, head);
    huge.send_bytes(head, sizeof head);
    CHECK(huge.closed_by_peer());
  }
  {
    RawRank newer(port);
    wire::Bytes bytes = wire::encode(wire::Hello{.rank = 1});
    bytes[0] = static_cast<uint8_t>(bytes[0] + 41);  // the version is the first field
    newer.send(wire::FrameKind::kHello, bytes);
    const auto answer = newer.receive();
    REQUIRE(answer);
    CHECK(answer->first.kind == wire::FrameKind::kReject);
    const base::Error e = wire::decode_error(answer->second);
    CHECK(e.kind == ErrorKind::kProtocol);
    CHECK(contains(e.message, std::to_string(wire::kProtocolVersion)));
    CHECK(newer.closed_by_peer());
  }
  {
    RawRank impatient(port);
    impatient.send(wire::FrameKind::kGo);
    CHECK(impatient.closed_by_peer());
  }
  {
    RawRank truncated(port);
    wire::Bytes bytes = wire::encode(wire::Hello{.rank = 1});
    bytes.resize(bytes.size() - 3);
    truncated.send(wire::FrameKind::kHello, bytes);
    const auto answer = truncated.receive();
    REQUIRE(answer);
    CHECK(wire::decode_error(answer->second).kind == ErrorKind::kProtocol);
  }
  // Peers that do not know the secret claim to be an unknown rank, rank 0 or the missing rank 1.
  for (const int rank : {7, 0, -5, 1}) {
    RawRank peer(port);
    CHECK_FALSE(peer.introduce(rank, wire::HelloPurpose::kPeer));
    CHECK(wire::decode_error(peer.heard).message == membership::refusal_without_reason().message);
    CHECK(peer.closed_by_peer());
  }
  {
    RawRank wrong(port);
    CHECK_FALSE(wrong.introduce(1, wire::HelloPurpose::kJoin, "another secret"));
    CHECK(wire::decode_error(wrong.heard).message == membership::refusal_without_reason().message);
    CHECK(wrong.closed_by_peer());
  }
  RawRank silent(port);
  check_comes_up(zero);
}

TEST_CASE("a rank that leaves during the meeting frees its place") {
  Joining zero(options_for(0, 3));
  const uint16_t port = zero.agent().port();
  {
    Joining one(options_for(1, 3, port));
    std::this_thread::sleep_for(100ms);
    one.agent().abort(base::Error{ErrorKind::kCancelled, "changed its mind", 1, {}});
    CHECK_FALSE(one.joined());
  }
  let_rank_0_catch_up(port);
  const bool still_waits = [&] {
    try {
      Joining one(options_for(1, 3, port));
      Joining two(options_for(2, 3, port));
      return one.joined() && two.joined() && zero.joined();
    } catch (const base::Exception&) {
      return false;
    }
  }();
  CHECK(still_waits);
}

TEST_CASE("a joining rank that disconnects during the meeting frees its place") {
  Joining zero(options_for(0, 3));
  const uint16_t port = zero.agent().port();
  for (int i = 0; i < 5; ++i) {
    RawRank(port).join(1);
    let_rank_0_catch_up(port);
  }
  check_three_join(zero);
}

TEST_CASE("a join that waits fails when its agent is destroyed, and its rank is free again") {
  const bool on_own_thread = GENERATE(false, true);  // if true, kill() does not wait for the end
  Joining zero(options_for(0, 3));
  const uint16_t port = zero.agent().port();
  for (int i = 0; i < 5; ++i) {
    Joining one(options_of_one(port, on_own_thread));
    while (!one.agent().is_admitted() && !one.ended()) std::this_thread::sleep_for(1ms);
    if (on_own_thread) {
      one.agent().executor().post([&] { one.kill(); });
    } else {
      one.kill();
    }
    CHECK(one.result().message == "this rank is shutting down");
    let_rank_0_catch_up(port);
  }
  check_three_join(zero, on_own_thread);
}

TEST_CASE("a join fails when its agent is destroyed while the rank prepares") {
  base::Promise<void> prepares, destroyed;
  Joining zero(options_for(0, 2));
  Joining one(options_for(1, 2, zero.agent().port()), [&] {
    prepares.set();
    destroyed.future().wait();
  });
  CHECK(prepares.future().wait_until(base::deadline_after(60s)));
  one.kill();
  destroyed.set();
  CHECK(one.result().message == "this rank is shutting down");
  zero.kill();
  CHECK_FALSE(zero.joined());
}

TEST_CASE("a rank that has joined is not a peer before all others have joined") {
  Joining zero(options_for(0, 3));
  const uint16_t port = zero.agent().port();
  {
    RawRank joining(port);
    joining.join(1);
    let_rank_0_catch_up(port);
    RawRank peer(port);
    CHECK_FALSE(peer.introduce(1, wire::HelloPurpose::kPeer));
    CHECK(peer.closed_by_peer());
  }
  let_rank_0_catch_up(port);
  check_three_join(zero);
}

TEST_CASE("the join timeout names the missing ranks") {
  base::Error e;
  base::Error told;
  // Tries longer timeouts until rank 2 joins in time on a slow machine.
  for (const auto timeout : {400ms, 4000ms, 16000ms}) {
    AgentOptions options = options_for(0, 4);
    options.join_timeout = timeout;
    Joining zero(options);
    Joining two(options_for(2, 4, zero.agent().port()));
    e = zero.result();
    told = two.result();
    if (contains(e.message, "missing: 1, 3")) break;
  }
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(
      contains(e.message,
               "missing: 1, 3; ranks 1, 3 have not connected: see their output; rank 0 listens on "
               "127.0.0.1, which only this host"));
  // Rank 2, which had joined, gets the same error as rank 0.
  CHECK(told.kind == ErrorKind::kRendezvous);
  CHECK(contains(told.message, "1, 3"));

  const ReservedPort nobody;
  AgentOptions lonely = options_for(1, 2, nobody.port());
  lonely.join_timeout = 300ms;
  const base::Error alone = Joining(lonely).result();
  CHECK(alone.kind == ErrorKind::kRendezvous);
  CHECK(alone.rank == 0);
}

TEST_CASE("a joined rank learns from rank 0 which ranks are missing, despite a shorter timeout") {
  base::Error told;
  for (const auto timeout : {200ms, 2000ms, 8000ms}) {  // until rank 1 joins in time
    AgentOptions options = options_for(0, 3);
    options.join_timeout = timeout;
    Joining zero(options);
    options = options_for(1, 3, zero.agent().port());
    options.join_timeout = timeout - 100ms;
    Joining one(options);
    told = one.result();
    if (told.rank == 2) break;
  }
  CHECK(contains(told.message, "missing: 2"));
  CHECK(told.rank == 2);
}

TEST_CASE("the join timeout names the ranks that are not prepared") {
  base::Error e;
  for (const auto timeout : {1s, 4s, 16s}) {  // until ranks 1 and 2 join in time
    AgentOptions options = options_for(0, 3);
    options.join_timeout = timeout;
    Joining zero(options);
    RawRank one(zero.agent().port()), two(zero.agent().port());
    one.join(1);
    two.join(2);
    if (!one.receive()) continue;  // the directory
    one.send(wire::FrameKind::kPrepared, no_devices());
    e = zero.result();
    if (contains(e.message, "missing: 2")) break;
  }
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "missing: 2"));
  CHECK(e.rank == 2);
}

TEST_CASE("rank 0 reports the ranks that have not connected") {
  AgentOptions options = options_for(0, 3);
  base::Promise<std::string> said;
  std::atomic<bool> is_first = true;
  options.on_waiting = [&](const std::vector<int>& missing, const std::string&,
                           const std::string& reason) {
    CHECK(missing == std::vector<int>{1, 2});
    if (is_first.exchange(false)) said.set(reason);
  };
  Joining zero(options);
  CHECK(
      said.future().wait().starts_with("ranks 1, 2 have not connected: see their output; rank 0"));
  zero.agent().abort(base::Error{ErrorKind::kCancelled, "that is enough", 0, {}});
  CHECK(zero.result().kind == ErrorKind::kCancelled);
}

TEST_CASE("while rank 0 is not found the reason is reported") {
  AgentOptions options = options_for(1, 2, 1);
  options.master_addr = "no-such-host.invalid";
  base::Promise<std::string> said;
  std::atomic<bool> is_first = true;
  options.on_waiting = [&](const std::vector<int>&, const std::string&, const std::string& reason) {
    if (is_first.exchange(false)) said.set(reason);
  };
  Joining lonely(options);
  CHECK(contains(said.future().wait(), "no-such-host.invalid"));
  lonely.agent().abort(base::Error{ErrorKind::kCancelled, "that is enough", 1, {}});
  CHECK(lonely.result().kind == ErrorKind::kCancelled);
}

TEST_CASE("a rank that joins fails if rank 0 dies") {
  Joining zero(options_for(0, 4));
  Joining one(options_for(1, 4, zero.agent().port()));
  Joining two(options_for(2, 4, zero.agent().port()));
  std::this_thread::sleep_for(100ms);
  zero.agent().abort(base::Error{ErrorKind::kCancelled, "ended by a signal", 0, {}});
  CHECK(zero.result().kind == ErrorKind::kCancelled);
  for (Joining* joining : {&one, &two}) {
    CHECK_FALSE(joining->joined());
    CHECK(joining->result().rank == 0);
  }
  // Accepts and closes connections without a message. Rank 1 retries until its join timeout.
  net::Fd listener = std::move(net::listen_tcp("localhost", 0).value());
  AgentOptions options = options_for(1, 2, net::local_name(listener.get()).port);
  options.join_timeout = 300ms;
  Joining lost(options);
  while (!lost.ended()) {
    const net::Fd connection(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::this_thread::sleep_for(1ms);
  }
  CHECK(lost.result().kind == ErrorKind::kRendezvous);
  CHECK(lost.result().rank == 0);
}

TEST_CASE("a false rank 0 is a protocol error") {
  net::Fd listener = std::move(net::listen_tcp("localhost", 0).value());
  const uint16_t port = net::local_name(listener.get()).port;
  const int flags = fcntl(listener.get(), F_GETFL);
  fcntl(listener.get(), F_SETFL, flags & ~O_NONBLOCK);
  Joining one(options_for(1, 2, port));
  const int connection = ::accept(listener.get(), nullptr, nullptr);
  REQUIRE(connection >= 0);
  const std::string greeting =
      "220 mail.example.org ESMTP Postfix (Debian/GNU) ready to serve you\r\n";
  CHECK(::send(connection, greeting.data(), greeting.size(), MSG_NOSIGNAL) > 0);
  CHECK(one.result().kind == ErrorKind::kProtocol);
  ::close(connection);
}

TEST_CASE("rank 0 may send the devices of all ranks only once") {
  net::Fd listener = std::move(net::listen_tcp("localhost", 0).value());
  const int flags = fcntl(listener.get(), F_GETFL);
  fcntl(listener.get(), F_SETFL, flags & ~O_NONBLOCK);
  AgentOptions options = options_for(1, 2, net::local_name(listener.get()).port);
  options.transport = "tcp";
  Joining one(options);
  RawRank zero(net::Fd(::accept(listener.get(), nullptr, nullptr)));
  const wire::Join join = zero.be_joined();
  zero.send(wire::FrameKind::kDirectory,
            wire::encode(wire::Directory{{{"w0", {}}, {"w1", {}}}, {}, "secret"}));
  REQUIRE(zero.receive());
  wire::Bytes twice;
  std::vector<wire::RankDevices> devices(2);
  for (int i = 0; i < 2; ++i) {  // sends both in one write so that they arrive together
    const wire::Bytes meta = wire::encode(devices);
    wire::FrameHeader header;
    header.kind = wire::FrameKind::kGo;
    header.meta_bytes = static_cast<uint32_t>(meta.size());
    uint8_t head[wire::kHeaderBytes];
    wire::encode_header(header, head);
    twice.insert(twice.end(), head, head + sizeof head);
    twice.insert(twice.end(), meta.begin(), meta.end());
    devices[0].home = {wire::DeviceType::kPrivate, 0};
    devices[0].type = wire::DeviceType::kPrivate;
    devices[0].count = 1;
  }
  zero.send_bytes(twice.data(), twice.size());
  REQUIRE(one.joined());
  RawRank peer(join.endpoint.port);
  CHECK(peer.introduce(0, wire::HelloPurpose::kPeer, "secret"));
  peer.send(wire::FrameKind::kCall);  // rank 1 replies after it has handled both kGo frames
  REQUIRE(peer.receive());
  CHECK(one.agent().device_of(0) == "cpu");
}

TEST_CASE("a type of device without transport is an error of the rank that has it") {
  for (const bool is_home : {true, false}) {
    AgentOptions options = options_for(0, 1);
    if (is_home) options.device = c10::Device(c10::kMeta);
    if (!is_home)
      options.device_maps = {{"w1", {{c10::Device(c10::kMeta), c10::Device(c10::kCPU)}}}};
    Joining zero(options);
    CHECK(zero.result().kind == ErrorKind::kInvalid);
    CHECK(contains(zero.result().message, "meta"));
  }
}

TEST_CASE("a rank that fails in prepare is the reported cause for ranks that join later") {
  std::promise<void> gone;
  Joining zero(options_for(0, 3));
  const uint16_t port = zero.agent().port();
  Joining one(options_for(1, 3, port), [] {
    throw base::Exception(base::Error{ErrorKind::kBadData, "no such file", -1, {}});
  });
  Joining two(options_for(2, 3, port), [&] { gone.get_future().wait(); });
  CHECK(one.result().kind == ErrorKind::kBadData);
  one.agent().abort(one.result());
  one.kill();
  gone.set_value();
  for (Joining* joining : {&zero, &two}) {
    CHECK(joining->result().kind == ErrorKind::kBadData);
    CHECK(joining->result().rank == 1);
    CHECK(joining->result().message == "no such file");
  }
}

TEST_CASE("options that are too long to join with are reported") {
  rpc::AgentOptions options = options_for(1, 2, 1);
  options.job_options["words"] = std::string(wire::kJoinLimits.max_meta_bytes, 'x');
  Joining joining(options);
  const base::Error error = joining.result();
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.message.find("the options that ranks have to agree on take 16397 bytes") == 0);
}

TEST_CASE("a taken port is an error") {
  Joining zero(options_for(0, 2));
  AgentOptions second = options_for(0, 2, zero.agent().port());
  const base::Error e = error_of([&] { Agent agent(second); });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, std::to_string(zero.agent().port())));
  zero.agent().abort(base::Error{ErrorKind::kCancelled, "end of the test", 0, {}});
}
