// ctest: timeout=180
// How the ranks of a job find each other, and how they notice that one is gone.
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "distrain/net/socket.h"
#include "distrain/wire/frame.h"
#include "distrain/wire/handshake.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using base::ErrorKind;
using rpc::Agent;
using rpc::AgentOptions;
using testing::Cluster;
using testing::error_of;

namespace {

int64_t add(int64_t a, int64_t b) { return a + b; }
void nap(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
void setup(Agent& agent) {
  agent.expose<&add>("add");
  agent.expose<&nap>("nap");
}

AgentOptions options_for(int rank, int world_size, uint16_t port = 0) {
  AgentOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.master_port = port;
  options.join_timeout = 20s;
  if (rank == 0) {
    for (int r = 0; r < world_size; ++r) options.names.push_back("w" + std::to_string(r));
  }
  return options;
}

// What a rank's join() comes to, on a thread of its own.
class Joining {
 public:
  explicit Joining(AgentOptions options) {
    agent_ = std::make_unique<Agent>(std::move(options));
    setup(*agent_);
    done_ = std::async(std::launch::async, [this] { return error_of([&] { agent_->join(); }); });
  }
  /// Kind internal and "(no error)" when it has joined.
  base::Error result() {
    if (!result_) result_ = done_.get();
    return *result_;
  }
  bool joined() { return result().message == "(no error)"; }
  Agent& agent() { return *agent_; }
  void kill() { agent_.reset(); }

 private:
  std::unique_ptr<Agent> agent_;
  std::future<base::Error> done_;
  std::optional<base::Error> result_;
};

// A rank by hand: frames over a blocking socket.
class RawRank {
 public:
  explicit RawRank(uint16_t port) {
    fd_ = std::move(net::connect_tcp("localhost", port, base::deadline_after(5s)).value());
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
  void send(wire::FrameKind kind, const wire::Bytes& meta = {}) {
    wire::FrameHeader header;
    header.kind = kind;
    header.meta_bytes = static_cast<uint32_t>(meta.size());
    uint8_t head[wire::kHeaderBytes];
    wire::encode_header(header, head);
    send_bytes(head, sizeof head);
    send_bytes(meta.data(), meta.size());
  }
  /// Its header and meta; nothing when the other side has closed, or says nothing for 10 s.
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
  void hello(int rank, wire::HelloPurpose purpose, const std::string& job = "distrain") {
    wire::Hello hello;
    hello.purpose = purpose;
    hello.job_id = job;
    hello.rank = rank;
    send(wire::FrameKind::kHello, wire::encode(hello));
  }

 private:
  bool receive_bytes(uint8_t* at, size_t size) {
    while (size > 0) {
      pollfd entry{fd_.get(), POLLIN, 0};
      if (::poll(&entry, 1, 10000) != 1) return false;
      const ssize_t got = ::recv(fd_.get(), at, size, 0);
      if (got <= 0) return false;
      at += got;
      size -= static_cast<size_t>(got);
    }
    return true;
  }
  net::Fd fd_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The job comes up with rank 1 as it should be, after all that rank 0 has been through.
void check_comes_up(Joining& zero) {
  Joining one(options_for(1, 2, zero.agent().port()));
  CHECK(one.joined());
  CHECK(zero.joined());
  if (!one.joined() || !zero.joined()) return;
  CHECK(zero.agent().rpc_sync<&add>(1, 2, 3) == 5);
  std::thread other([&] { one.agent().shutdown(); });
  zero.agent().shutdown();
  other.join();
}

}  // namespace

TEST_CASE("a rank that does not fit is refused, and rank 0 goes on") {
  AgentOptions options = options_for(0, 2);
  options.job_options = {{"epochs", "10"}, {"lr", "0.05"}};
  Joining zero(options);
  const uint16_t port = zero.agent().port();
  const auto refused = [&](const std::function<void(AgentOptions&)>& change) {
    AgentOptions mine = options_for(1, 2, port);
    change(mine);
    return Joining(mine).result();
  };

  base::Error e = refused([](AgentOptions& o) { o.world_size = 3; });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "world size"));
  CHECK(contains(e.message, "3"));
  CHECK(contains(e.message, "2"));

  e = refused([](AgentOptions& o) { o.rank = 2, o.world_size = 0; });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "rank: 2"));

  e = refused([](AgentOptions& o) { o.rank = 1000000, o.world_size = 0; });
  CHECK(e.kind == ErrorKind::kRendezvous);

  e = refused([](AgentOptions& o) { o.job_options = {{"epochs", "11"}}; });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "epochs"));
  CHECK(contains(e.message, "11"));
  CHECK(contains(e.message, "10"));

  e = refused([](AgentOptions& o) { o.job_id = "another"; });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "'another'"));
  CHECK(contains(e.message, "'distrain'"));

  check_comes_up(zero);
}

TEST_CASE("a rank can be taken only once") {
  Joining zero(options_for(0, 3));
  const uint16_t port = zero.agent().port();
  Joining first(options_for(1, 3, port));
  // The second is refused once the first is in; which is which, rank 0 decides.
  Joining second(options_for(1, 3, port));
  Joining* refused = nullptr;
  {
    RawRank probe(port);  // until rank 0 has seen both
    probe.send(wire::FrameKind::kMeshReady);
    CHECK(probe.closed_by_peer());
  }
  std::this_thread::sleep_for(50ms);
  Joining two(options_for(2, 3, port));
  CHECK(two.joined());
  CHECK(zero.joined());
  REQUIRE(first.joined() != second.joined());
  refused = first.joined() ? &second : &first;
  Joining* taken = first.joined() ? &first : &second;
  CHECK(refused->result().kind == ErrorKind::kRendezvous);
  CHECK(contains(refused->result().message, "taken already"));
  CHECK(taken->agent().rpc_sync<&add>(2, 1, 2) == 3);
}

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
    // A frame that says it is 4 GiB long.
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
    wire::Hello hello;
    hello.job_id = "distrain";
    hello.rank = 1;
    wire::Bytes bytes = wire::encode(hello);
    bytes[0] = static_cast<uint8_t>(bytes[0] + 41);  // the version comes first
    newer.send(wire::FrameKind::kHello, bytes);
    const auto answer = newer.receive();
    REQUIRE(answer);
    CHECK(answer->first.kind == wire::FrameKind::kReject);
    const base::Error e = wire::decode_error(answer->second);
    CHECK(e.kind == ErrorKind::kProtocol);
    CHECK(contains(e.message, std::to_string(wire::kProtocolVersion)));
    CHECK(contains(e.message, std::to_string(wire::kProtocolVersion + 41)));
    CHECK(newer.closed_by_peer());
  }
  {
    RawRank impatient(port);
    impatient.send(wire::FrameKind::kGo);
    CHECK(impatient.closed_by_peer());
  }
  {
    RawRank truncated(port);
    wire::Hello hello;
    hello.rank = 1;
    wire::Bytes bytes = wire::encode(hello);
    bytes.resize(bytes.size() - 3);
    truncated.send(wire::FrameKind::kHello, bytes);
    const auto answer = truncated.receive();
    REQUIRE(answer);
    CHECK(wire::decode_error(answer->second).kind == ErrorKind::kProtocol);
  }
  {
    // Says hello as a peer of ranks that do not exist.
    RawRank peer(port);
    peer.hello(7, wire::HelloPurpose::kPeer);
    CHECK(peer.closed_by_peer());
    RawRank self(port);
    self.hello(0, wire::HelloPurpose::kPeer);
    CHECK(self.closed_by_peer());
    RawRank negative(port);
    negative.hello(-5, wire::HelloPurpose::kPeer);
    CHECK(negative.closed_by_peer());
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
  std::this_thread::sleep_for(100ms);
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

TEST_CASE("a joiner that is cut off during the meeting frees its place") {
  Joining zero(options_for(0, 3));
  const uint16_t port = zero.agent().port();
  for (int i = 0; i < 5; ++i) {
    RawRank(port).hello(1, wire::HelloPurpose::kJoin);
    std::this_thread::sleep_for(20ms);
  }
  std::this_thread::sleep_for(100ms);
  Joining one(options_for(1, 3, port));
  Joining two(options_for(2, 3, port));
  CHECK(one.joined());
  CHECK(two.joined());
  CHECK(zero.joined());
}

TEST_CASE("the join timeout names those who are missing") {
  AgentOptions options = options_for(0, 4);
  options.join_timeout = 400ms;
  Joining zero(options);
  Joining two(options_for(2, 4, zero.agent().port()));
  const base::Error e = zero.result();
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, "1, 3"));
  CHECK_FALSE(contains(e.message, "2"));
  // Who had come is told the same.
  CHECK(two.result().kind == ErrorKind::kRendezvous);
  CHECK(contains(two.result().message, "1, 3"));

  AgentOptions lonely = options_for(1, 2, zero.agent().port());
  zero.kill();
  lonely.join_timeout = 300ms;
  const base::Error alone = Joining(lonely).result();
  CHECK(alone.kind == ErrorKind::kRendezvous);
  CHECK(alone.rank == 0);
}

TEST_CASE("rank 0 dies while others join") {
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
  // Without a word: a socket that accepts and closes.
  net::Fd listener = std::move(net::listen_tcp("localhost", 0).value());
  const uint16_t port = net::local_name(listener.get()).port;
  Joining lost(options_for(1, 2, port));
  const int flags = fcntl(listener.get(), F_GETFL);
  fcntl(listener.get(), F_SETFL, flags & ~O_NONBLOCK);
  const int connection = ::accept(listener.get(), nullptr, nullptr);
  REQUIRE(connection >= 0);
  std::this_thread::sleep_for(50ms);
  ::close(connection);
  CHECK(lost.result().kind == ErrorKind::kRendezvous);
  CHECK(lost.result().rank == 0);
}

TEST_CASE("a rank 0 that is no rank 0 is a protocol error") {
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

TEST_CASE("a port that is taken") {
  Joining zero(options_for(0, 2));
  AgentOptions second = options_for(0, 2, zero.agent().port());
  const base::Error e = error_of([&] { Agent agent(second); });
  CHECK(e.kind == ErrorKind::kRendezvous);
  CHECK(contains(e.message, std::to_string(zero.agent().port())));
  zero.agent().abort(base::Error{ErrorKind::kCancelled, "end of the test", 0, {}});
}

TEST_CASE("a peer that is connected but silent is lost after peer_timeout") {
  AgentOptions options = options_for(0, 2);
  options.peer_timeout = 500ms;
  Joining zero(options);
  const uint16_t port = zero.agent().port();
  // Rank 1 by hand: it joins as it should, and then says nothing more.
  RawRank joining(port);
  joining.hello(1, wire::HelloPurpose::kJoin);
  const auto directory = joining.receive();
  REQUIRE(directory);
  CHECK(directory->first.kind == wire::FrameKind::kDirectory);
  CHECK(wire::decode_directory(directory->second).ranks.size() == 2);
  RawRank peer(port);
  peer.hello(1, wire::HelloPurpose::kPeer);
  joining.send(wire::FrameKind::kMeshReady);
  const auto go = joining.receive();
  REQUIRE(go);
  CHECK(go->first.kind == wire::FrameKind::kGo);
  REQUIRE(zero.joined());
  const auto began = std::chrono::steady_clock::now();
  const base::Error e =
      error_of([&] { zero.agent().rpc_sync<&add>(rpc::To(1).without_deadline(), 1, 2); });
  const auto took = std::chrono::steady_clock::now() - began;
  CHECK(e.kind == ErrorKind::kPeerLost);
  CHECK(e.rank == 1);
  CHECK(contains(e.message, "silent"));
  CHECK(took > 300ms);
  CHECK(took < 5s);
  // It was being spoken to meanwhile.
  bool heartbeat = false;
  while (const auto frame = peer.receive()) {
    heartbeat = heartbeat || frame->first.kind == wire::FrameKind::kHeartbeat;
  }
  CHECK(heartbeat);
  CHECK(error_of([&] { zero.agent().shutdown(); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("a peer that sends garbage once it is connected is lost") {
  Joining zero(options_for(0, 2));
  RawRank joining(zero.agent().port());
  joining.hello(1, wire::HelloPurpose::kJoin);
  REQUIRE(joining.receive());
  RawRank peer(zero.agent().port());
  peer.hello(1, wire::HelloPurpose::kPeer);
  joining.send(wire::FrameKind::kMeshReady);
  REQUIRE(joining.receive());
  REQUIRE(zero.joined());
  auto call = zero.agent().rpc_async<&add>(rpc::To(1).without_deadline(), 1, 2);
  SECTION("no frame at all") {
    const std::string garbage(200, 'x');
    peer.send_bytes(garbage.data(), garbage.size());
  }
  SECTION("a frame out of place") { peer.send(wire::FrameKind::kDirectory); }
  SECTION("an error that cannot be read") { peer.send(wire::FrameKind::kAbort, {1, 2}); }
  SECTION("an RRef of a rank that does not exist") {
    wire::FrameHeader header;
    header.kind = wire::FrameKind::kRRefFork;
    header.autograd_id = 99;
    uint8_t head[wire::kHeaderBytes];
    wire::encode_header(header, head);
    peer.send_bytes(head, sizeof head);
  }
  const base::Error e = error_of([&] { call.wait(); });
  CHECK(e.kind == ErrorKind::kProtocol);
  CHECK(e.rank == 1);
}

TEST_CASE("calls that cannot be read are answered with an error") {
  Joining zero(options_for(0, 2));
  RawRank joining(zero.agent().port());
  joining.hello(1, wire::HelloPurpose::kJoin);
  REQUIRE(joining.receive());
  RawRank peer(zero.agent().port());
  peer.hello(1, wire::HelloPurpose::kPeer);
  joining.send(wire::FrameKind::kMeshReady);
  REQUIRE(joining.receive());
  REQUIRE(zero.joined());
  for (const wire::Bytes& meta : {wire::Bytes{}, wire::Bytes{255, 255, 255, 255},
                                  wire::Bytes{0, 0, 0, 0}, wire::Bytes(64, 7)}) {
    peer.send(wire::FrameKind::kCall, meta);
    for (;;) {
      const auto answer = peer.receive();
      REQUIRE(answer);
      if (answer->first.kind == wire::FrameKind::kHeartbeat) continue;
      CHECK(answer->first.kind == wire::FrameKind::kError);
      const base::Error e = wire::decode_error(answer->second);
      CHECK((e.kind == ErrorKind::kProtocol || e.kind == ErrorKind::kNotFound));
      break;
    }
  }
}

TEST_CASE("heartbeats keep idle connections alive") {
  AgentOptions options;
  options.peer_timeout = 150ms;
  Cluster cluster(3, setup, options);
  std::this_thread::sleep_for(600ms);
  // A handler that takes longer than the timeout does not make its rank silent.
  cluster[0].rpc_sync<&nap>(1, 500);
  for (int rank = 0; rank < 3; ++rank)
    CHECK(cluster[rank].rpc_sync<&add>((rank + 1) % 3, 1, 1) == 2);
  cluster.shutdown();
}

TEST_CASE("jobs of 1, 8 and 16 ranks, over each transport") {
  const int size = GENERATE(1, 8, 16);
  const std::string transport = GENERATE("unix", "tcp", "auto");
  AgentOptions options;
  options.transport = transport;
  options.worker_threads = 1;
  options.job_options = {{"epochs", "3"}};
  Cluster cluster(size, setup, options);
  CAPTURE(size, transport);
  if (size > 1) {
    CHECK(cluster[size - 1].transport() == (transport == "tcp" ? "tcp" : "unix"));
  }
  cluster.on_all([&](Agent& agent) {
    for (int to = 0; to < size; ++to) {
      if (agent.rpc_sync<&add>(to, agent.rank(), to) != agent.rank() + to) {
        throw std::runtime_error("a wrong sum");
      }
    }
  });
  CHECK(cluster[size - 1].job_options().at("epochs") == "3");
  CHECK(cluster[size - 1].name() == "w" + std::to_string(size - 1));
  cluster.shutdown();
}

TEST_CASE("ranks join in any order, also before rank 0 is there") {
  net::Fd reserved = std::move(net::listen_tcp("localhost", 0).value());
  const uint16_t port = net::local_name(reserved.get()).port;
  reserved.reset();
  std::vector<std::unique_ptr<Joining>> ranks;
  for (int rank : {3, 1, 2}) ranks.push_back(std::make_unique<Joining>(options_for(rank, 4, port)));
  std::this_thread::sleep_for(100ms);
  ranks.push_back(std::make_unique<Joining>(options_for(0, 4, port)));
  for (const auto& rank : ranks) CHECK(rank->joined());
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&] { rank->agent().shutdown(); });
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("prepare runs when the options are known and before anybody calls; it may throw") {
  AgentOptions options = options_for(0, 2);
  options.job_options = {{"dim", "16"}};
  Joining zero(options);
  AgentOptions mine = options_for(1, 2, zero.agent().port());
  Agent one(mine);
  std::string dim;
  const base::Error e = error_of([&] {
    one.join([&] {
      dim = one.job_options().at("dim");
      throw base::Exception(ErrorKind::kBadData, "no such data");
    });
  });
  CHECK(dim == "16");
  CHECK(e.kind == ErrorKind::kBadData);
  one.abort(e);
  CHECK_FALSE(zero.joined());
  CHECK(zero.result().rank == 1);
}

TEST_CASE("nothing is left on the disk") {
  std::string folder = (std::filesystem::temp_directory_path() / "join-test-XXXXXX").string();
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  const char* before = std::getenv("TMPDIR");
  const std::string saved = before ? before : "";
  setenv("TMPDIR", folder.c_str(), 1);
  {
    Cluster cluster(3, setup);
    CHECK(std::filesystem::is_empty(folder));  // once all are connected
    AgentOptions alone = options_for(0, 2);
    alone.join_timeout = 50ms;
    CHECK(Joining(alone).result().kind == ErrorKind::kRendezvous);
  }
  CHECK(std::filesystem::is_empty(folder));
  before ? setenv("TMPDIR", saved.c_str(), 1) : unsetenv("TMPDIR");
  std::filesystem::remove_all(folder);
}
