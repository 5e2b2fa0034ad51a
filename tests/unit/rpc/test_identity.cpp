// Tests each field of the handshake of Note [Identity], and agents that do not belong together.
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>

#include <openssl/crypto.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "control/doorway.h"
#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::AgentOptions;
using rpc::identity::Credentials;
using rpc::identity::Initiator;
using rpc::identity::Responder;
using wire::HelloPurpose;

namespace {

constexpr wire::JobId kJob{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

Credentials of(int rank, const std::string& secret = "a secret of the job") {
  return {{rank, wire::Trust::kToken, 4, kJob}, secret};
}

template <class Call>
ErrorKind kind_of(const Call& call) {
  return error_of(call).kind;
}

std::string hex(std::span<const uint8_t> bytes) {
  return rpc::identity::hex({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

// The messages of one connection, for a replay on another one.
struct Words {
  wire::Bytes initiator_hello, responder_hello;
  wire::Proof initiator_proof, responder_proof;
};

Words exchange(HelloPurpose purpose) {
  Initiator initiator(of(1), purpose);
  const Responder responder(of(0), wire::decode_hello(initiator.hello()));
  Words words{initiator.hello(), responder.hello(), initiator.answer(responder.hello()), {}};
  words.responder_proof = responder.check(words.initiator_proof);
  initiator.check(words.responder_proof);
  CHECK(initiator.other().rank == 0);
  CHECK(responder.other().rank == 1);
  return words;
}

}  // namespace

// Runs in its own process. `look` runs after all exit handlers that were registered later,
// including OpenSSL's, while a thread keeps authenticating. Without the environment variable (a
// normal run of all tests) it does nothing.
TEST_CASE("a process exits while a thread uses OpenSSL", "[.][exits]") {
  if (!std::getenv("DISTRAIN_TEST_EXIT")) return;
  static base::Error refused;
  static std::thread thread;
  static bool worked_before = false;
  static std::atomic<int> rounds_left{-1};  // endless
  const auto look = [] {
    rounds_left = 100;
    thread.join();
    _exit(worked_before && refused.kind == ErrorKind::kCancelled ? 0 : 1);
  };
  std::atexit(look);
  rpc::identity::set_up();
  std::atexit([] {  // stands for the destructor of a static agent
    worked_before = OPENSSL_init_crypto(OPENSSL_INIT_LOAD_CRYPTO_STRINGS, nullptr) == 1;
  });
  thread = std::thread([] {
    refused = error_of([] {
      for (; rounds_left != 0; rounds_left -= rounds_left > 0) exchange(HelloPurpose::kPeer);
    });
  });
  std::exit(2);
}

TEST_CASE("after exit() authentication fails, and OpenSSL is not used") {
  char program[] = "unit_rpc";
  char test[] = "[exits]";
  char* arguments[] = {program, test, nullptr};
  pid_t child = 0;
  REQUIRE(setenv("DISTRAIN_TEST_EXIT", "1", 1) == 0);
  REQUIRE(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ) == 0);
  unsetenv("DISTRAIN_TEST_EXIT");
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

// The test cases 1 and 2 of RFC 4231; HMAC pads their keys with zeros. HKDF as Python's hmac module
// computes it, with an empty secret as one zero byte.
TEST_CASE("keys and proofs match the RFCs") {
  rpc::identity::Key key{};
  std::fill_n(key.begin(), 20, uint8_t{0x0b});
  const std::string hi = "Hi There";
  const auto bytes = [](const std::string& text) {
    return std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  };
  CHECK(hex(rpc::identity::authenticate(key, {bytes(hi)})) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  key = {'J', 'e', 'f', 'e'};
  const std::string what = "what do ya want ", nothing = "for nothing?";
  CHECK(hex(rpc::identity::authenticate(key, {bytes(what), bytes(nothing)})) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(rpc::identity::derive("secret", "join initiator")) ==
        "d54289cbe39a6a049004f25419c4d03a1ec78518ac078c77edbee0895e2e090f");
  CHECK(hex(rpc::identity::derive("", "join initiator")) ==
        "dd32e40be3fe2e071c25a0ff5d3cc853722d733143fc3380fc428a0d0e34f028");
}

TEST_CASE("two sides that know the same secret accept each other") {
  std::set<wire::Bytes> hellos;
  for (int i = 0; i < 100; ++i) {
    for (const auto purpose : {HelloPurpose::kJoin, HelloPurpose::kPeer}) {
      const Words words = exchange(purpose);
      CHECK(hellos.insert(words.initiator_hello).second);  // nonces are fresh
      CHECK(hellos.insert(words.responder_hello).second);
    }
  }
}

TEST_CASE("a side that does not know the secret is refused") {
  for (const auto purpose : {HelloPurpose::kJoin, HelloPurpose::kPeer}) {
    Initiator honest(of(1), purpose);
    Initiator impostor(of(1, "another secret"), purpose);
    const Responder responder(of(0), wire::decode_hello(impostor.hello()));
    const wire::Proof proof = impostor.answer(responder.hello());
    CHECK(kind_of([&] { responder.check(proof); }) == ErrorKind::kAuth);
    const Responder fake(of(0, "another secret"), wire::decode_hello(honest.hello()));
    honest.answer(fake.hello());
    CHECK(kind_of([&] { honest.check(rpc::identity::authenticate({}, {fake.hello()})); }) ==
          ErrorKind::kAuth);
  }
}

TEST_CASE("messages of another connection, or of the other side, are not a proof") {
  for (const auto purpose : {HelloPurpose::kJoin, HelloPurpose::kPeer}) {
    const Words before = exchange(purpose);
    // Replayed to a responder, whose nonce differs now.
    const Responder responder(of(0), wire::decode_hello(before.initiator_hello));
    CHECK(kind_of([&] { responder.check(before.initiator_proof); }) == ErrorKind::kAuth);
    // Replayed to an initiator.
    Initiator initiator(of(1), purpose);
    initiator.answer(before.responder_hello);
    CHECK(kind_of([&] { initiator.check(before.responder_proof); }) == ErrorKind::kAuth);
    // Reflected: each side gets its own messages back.
    Initiator alone(of(1), purpose);
    const wire::Proof own = alone.answer(alone.hello());
    CHECK(kind_of([&] { alone.check(own); }) == ErrorKind::kAuth);
    // A proof for the other purpose.
    const auto other = purpose == HelloPurpose::kJoin ? HelloPurpose::kPeer : HelloPurpose::kJoin;
    Initiator swapped(of(1), other);
    CHECK(kind_of([&] { swapped.answer(before.responder_hello); }) == ErrorKind::kAuth);
  }
}

TEST_CASE("each bit of both hellos and of both proofs is checked") {
  for (const auto purpose : {HelloPurpose::kJoin, HelloPurpose::kPeer}) {
    const size_t bits = exchange(purpose).initiator_hello.size() * 8;
    REQUIRE(bits == 66 * 8);
    // In the initiator's hello, as the responder receives it.
    for (size_t bit = 0; bit < bits; ++bit) {
      Initiator initiator(of(1), purpose);
      wire::Bytes changed = initiator.hello();
      changed[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      const auto accepts = [&] {
        const Responder responder(of(0), wire::decode_hello(changed));
        responder.check(initiator.answer(responder.hello()));
      };
      const ErrorKind kind = kind_of(accepts);
      REQUIRE((kind == ErrorKind::kAuth || kind == ErrorKind::kProtocol));
    }
    // In the responder's hello, as the initiator receives it.
    for (size_t bit = 0; bit < bits; ++bit) {
      Initiator initiator(of(1), purpose);
      const Responder responder(of(0), wire::decode_hello(initiator.hello()));
      wire::Bytes changed = responder.hello();
      changed[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      const ErrorKind kind = kind_of([&] { responder.check(initiator.answer(changed)); });
      REQUIRE((kind == ErrorKind::kAuth || kind == ErrorKind::kProtocol));
    }
    for (size_t bit = 0; bit < 256; ++bit) {
      Initiator initiator(of(1), purpose);
      const Responder responder(of(0), wire::decode_hello(initiator.hello()));
      const wire::Proof right = initiator.answer(responder.hello());
      wire::Proof changed = right;
      changed[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      REQUIRE(kind_of([&] { responder.check(changed); }) == ErrorKind::kAuth);
      changed = responder.check(right);
      changed[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      REQUIRE(kind_of([&] { initiator.check(changed); }) == ErrorKind::kAuth);
    }
  }
}

TEST_CASE("proofs that are too short or too long are malformed") {
  Initiator initiator(of(1), HelloPurpose::kJoin);
  const Responder responder(of(0), wire::decode_hello(initiator.hello()));
  const wire::Proof proof = initiator.answer(responder.hello());
  wire::Bytes bytes(proof.begin(), proof.end());
  bytes.push_back(0);
  CHECK(kind_of([&] { responder.check(bytes); }) == ErrorKind::kProtocol);
  for (size_t size = 0; size < proof.size(); ++size) {
    CHECK(kind_of([&] { responder.check(std::span(proof).first(size)); }) == ErrorKind::kProtocol);
  }
}

TEST_CASE("another job and another generation are named") {
  const rpc::identity::Self self = of(0).self;
  wire::Hello other{HelloPurpose::kJoin, self.trust, 1, self.generation, 0, self.job_id, {}};
  CHECK_FALSE(rpc::identity::mismatch(self, other));
  other.job_id = {};  // does not know its job ID yet
  CHECK_FALSE(rpc::identity::mismatch(self, other));
  other.job_id = {9};
  CHECK(contains(rpc::identity::mismatch(self, other)->message, "rank 1 belongs to job 09000000"));
  other.job_id = self.job_id;
  other.generation = 3;
  CHECK(contains(rpc::identity::mismatch(self, other)->message, "is of generation 3, rank 0 of 4"));
  // Also with a wrong proof, because messages from before a restart may arrive late.
  const auto why = [&] { return rpc::identity::why_not_believed(self, other); };
  CHECK(contains(why(),
                 "another token than rank 0 (it says that it is of generation 3, rank 0 of 4)"));
  other.purpose = HelloPurpose::kPeer;
  CHECK(contains(why(), "this job's ranks (it says that it is of generation 3, rank 0 of 4)"));
  other.generation = wire::kAnyGeneration;  // does not know its generation
  CHECK_FALSE(rpc::identity::mismatch(self, other));
  CHECK_FALSE(contains(why(), "generation"));
}

// ---- agents ----

namespace {

// Records the errors for which rank 0 refuses ranks.
struct Refusals {
  std::mutex mutex;
  std::vector<base::Error> all;  // guarded by `mutex`

  void listen(AgentOptions& options) {
    options.on_refused = [this](const base::Error& error) {
      std::lock_guard lock(mutex);
      all.push_back(error);
    };
  }
  std::string first() {
    std::lock_guard lock(mutex);
    return all.empty() ? "" : all.front().message;
  }
  std::vector<base::Error> told() {
    std::lock_guard lock(mutex);
    return all;
  }
};

}  // namespace

TEST_CASE("ranks with the same token form a job, over any transport") {
  AgentOptions options;
  options.token = "a token that nobody knows";
  options.transport = GENERATE("unix", "tcp");
  options.generation = 7;
  options.job_id = "job 12";
  Cluster cluster(3, setup, options);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(cluster[rank].rpc_sync<&add>((rank + 1) % 3, 1, 1) == 2);
  }
  cluster.shutdown();
}

TEST_CASE("a rank that rank 0 refuses gets an error on both sides, and the job starts") {
  AgentOptions options = options_for(0, 2);
  Refusals refusals;
  refusals.listen(options);
  std::string said;  // by the refused rank
  std::string heard;
  AgentOptions mine = options_for(1, 2);
  SECTION("another token") {
    options.token = "the right token of it";
    mine.token = "a wrong token";
    said = "rank 0 has another token than rank 1: start both with the same --token-file";
    heard = "rank 1 has another token than rank 0";
  }
  SECTION("no token") {
    options.token = "the right token of it";
    said = "rank 0 has a token, rank 1 has none";
    heard = "rank 1 has no token, rank 0 has one";
  }
  SECTION("a token on one side only") {
    mine.token = "a token";
    said = "rank 0 has no token, rank 1 has one";
    heard = "rank 1 has a token, rank 0 has none";
  }
  SECTION("rank 0 accepts every rank") {
    options.insecure = true;
    said = "rank 0 was started with --insecure, rank 1 was not";
    heard = "rank 0 was started with --insecure, rank 1 was not";
  }
  const std::string token = options.token;
  const bool insecure = options.insecure;
  Joining zero(options);
  mine.master_port = zero.agent().port();
  const base::Error error = Joining(mine).result();
  CHECK(error.kind == ErrorKind::kAuth);
  CHECK(error.rank == 0);
  CHECK(contains(error.message, said));
  Joining one([&] {
    AgentOptions right = options_for(1, 2, zero.agent().port());
    right.token = token;
    right.insecure = insecure;
    return right;
  }());
  CHECK(one.joined());
  CHECK(zero.joined());
  CHECK(contains(refusals.first(), heard));
  CHECK_FALSE(contains(refusals.first() + error.message, "a wrong token"));
  CHECK_FALSE(contains(refusals.first() + error.message, "the right token"));
  std::thread other([&] { one.agent().shutdown(); });
  zero.agent().shutdown();
  other.join();
}

TEST_CASE("rank 0 reports each rank that it refuses, and why it waits for it") {
  base::Error error;
  std::vector<base::Error> told;
  for (const auto timeout : {1s, 4s, 16s, 64s}) {  // until the ranks come in time
    AgentOptions options = options_for(0, 4);
    options.token = "the right token of it";
    options.join_timeout = timeout;
    options.job_options = {{"lr", "0.05"}};
    Refusals refusals;
    refusals.listen(options);
    Joining zero(options);
    AgentOptions right = options_for(1, 4, zero.agent().port());
    right.token = options.token;
    const auto refuse = [&](auto change) {
      AgentOptions mine = right;
      change(mine);
      Joining(mine).result();
    };
    const auto has_another_lr = [](AgentOptions& o) { o.job_options = {{"lr", "0.5"}}; };
    refuse(has_another_lr);
    refuse(has_another_lr);
    refuse([](AgentOptions& o) { o.token = "a wrong token"; });
    refuse([](AgentOptions& o) { o.rank = 2, o.world_size = 3; });
    refuse([](AgentOptions& o) { o.rank = 3, o.token = ""; });
    refuse([](AgentOptions& o) { o.rank = 7, o.world_size = 0; });
    Joining one(right);  // later refusals of this rank do not matter
    while (!one.agent().has_place() && !one.ended()) std::this_thread::sleep_for(1ms);
    refuse([](AgentOptions& o) { o.rank = 1; });
    error = zero.result();
    told = refusals.told();
    if (contains(error.message, "missing: 2, 3") && told.size() == 6) break;
  }
  const std::vector<std::string> why{
      "1 from this host: --lr is 0.5 on rank 1, 0.05 on rank 0: give all ranks the same value, or "
      "only rank 0",
      "1 from this host: rank 1 has another token than rank 0: start both with the same "
      "--token-file",
      "2 from this host: rank 2 expects a world size of 3 (--world-size), rank 0 has 4 ranks",
      "3 from this host: rank 3 has no token, rank 0 has one: start it with the same --token-file",
      "7 from this host: there is no rank 7: this job has ranks 0 to 3",
      "1 from this host: rank 1 has been taken already by another process: each needs a --rank of "
      "its own, and each job that meets at this address a --job-id or --master-port of its own"};
  REQUIRE(told.size() == why.size());
  for (size_t i = 0; i < why.size(); ++i) {
    CHECK(told[i].message == "refused rank " + why[i]);
    CHECK(told[i].rank == why[i][0] - '0');
  }
  CHECK(error.message ==
        "not all ranks were there within the join timeout (--join-timeout); missing: 2, 3; refused "
        "rank " +
            why[5] + "; refused rank " + why[2] + "; refused rank " + why[3] + "; refused rank " +
            why[4]);
}

TEST_CASE("claims of strangers use little memory and print few lines") {
  rpc::control::Refusals refusals(3);
  int told = 0;
  for (int rank = -5000; rank < 5000; ++rank) {
    const std::string text = "refused rank " + std::to_string(rank);
    told += refusals.add(rank, text, text) ? 1 : 0;
  }
  CHECK(told == 8 + 2);  // 8 for unknown ranks, and ranks 1 and 2
  CHECK(refusals.text() == "refused rank 1; refused rank 2; refused rank 4999");
  CHECK_FALSE(refusals.add(1, "refused rank 1", "again"));
  CHECK(refusals.text() == "again; refused rank 2; refused rank 4999");
  CHECK(refusals.add(1, "another reason", ""));
  refusals.forget(1);  // the rank has joined
  CHECK(refusals.text() == "refused rank 2; refused rank 4999");
}

TEST_CASE("a rank of another job or of an earlier generation is refused") {
  AgentOptions options = options_for(0, 2);
  options.job_id = "job 1";
  options.generation = 2;
  Refusals refusals;
  refusals.listen(options);
  Joining zero(options);
  AgentOptions mine = options_for(1, 2, zero.agent().port());
  mine.generation = 2;
  std::string said;
  SECTION("another job") {
    mine.job_id = "job 2";
    said = "rank 0 belongs to job ";
  }
  SECTION("an earlier generation") {
    mine.generation = 1;
    said = "rank 0 is of generation 2, rank 1 of 1";
  }
  const base::Error error = Joining(mine).result();
  INFO(error.message);
  CHECK(error.kind == ErrorKind::kRendezvous);
  CHECK(contains(error.message, said));
  AgentOptions right = options_for(1, 2, zero.agent().port());
  right.generation = 2;
  Joining one(right);
  CHECK(one.joined());
  CHECK(zero.joined());
  CHECK_FALSE(refusals.first().empty());
}

TEST_CASE("a rank of a later generation waits until rank 0 is restarted") {
  const ReservedPort reserved;
  AgentOptions options = options_for(0, 2, reserved.port());
  Refusals refusals;
  refusals.listen(options);
  auto old_zero = std::make_unique<Joining>(options);
  AgentOptions mine = options_for(1, 2, reserved.port());
  mine.generation = 1;
  Joining one(mine);
  while (refusals.first().empty()) std::this_thread::sleep_for(1ms);  // rank 0 has refused it once
  if (one.ended()) FAIL(one.result().message);
  old_zero->agent().abort(base::Error{ErrorKind::kCancelled, "started again", 0, {}});
  CHECK_FALSE(old_zero->joined());
  old_zero = nullptr;
  options.generation = 1;
  Joining zero(options);
  CHECK(one.joined());
  CHECK(zero.joined());
}

TEST_CASE("a rank that does not know its generation gets rank 0's") {
  AgentOptions options = options_for(0, 3);
  options.generation = 7;
  Joining zero(options);
  Joining one(options_for(1, 3, zero.agent().port()));
  AgentOptions told = options_for(2, 3, zero.agent().port());
  told.generation = 7;
  Joining two(told);
  CHECK(zero.joined());
  CHECK(one.joined());
  CHECK(two.joined());
  CHECK(one.agent().rpc_sync<&add>(2, 1, 2) == 3);
}

TEST_CASE("a rank that rejoins retries while the old job is still running") {
  const ReservedPort reserved;
  const AgentOptions options = options_for(0, 2, reserved.port());
  auto old_zero = std::make_unique<Joining>(options);
  auto old_one = std::make_unique<Joining>(options_for(1, 2, reserved.port()));
  REQUIRE(old_zero->joined());
  REQUIRE(old_one->joined());
  AgentOptions again = options_for(1, 2, reserved.port());
  const base::Error taken = Joining(again).result();
  CHECK(taken.kind == ErrorKind::kRendezvous);
  CHECK(contains(taken.message, "has been taken already"));
  again.rejoins = true;
  Joining one(again);
  SECTION("until rank 0 is restarted") {
    std::this_thread::sleep_for(50ms);  // long enough for several retries
    if (one.ended()) FAIL(one.result().message);
    old_zero->agent().abort(base::Error{ErrorKind::kCancelled, "started again", 0, {}});
    old_zero = nullptr;
    old_one = nullptr;
    Joining zero(options);
    CHECK(one.joined());
    CHECK(zero.joined());
  }
  SECTION("until it is aborted") {
    std::this_thread::sleep_for(50ms);
    one.agent().abort(base::Error{ErrorKind::kPeerLost, "another one", 5, {}});
    CHECK(one.result().rank == 5);
  }
}

TEST_CASE("the user of the other end of a loopback connection is known") {
  for (const char* host : {"127.0.0.1", "localhost", "::1", "*"}) {
    const base::Result<net::Fd> listening =
        net::listen_tcp(std::string(host) == "*" ? "" : host, 0);
    if (!listening.ok()) continue;  // no IPv6 on this machine
    const uint16_t port = net::local_name(listening.unchecked().get()).port;
    const std::string to = std::string(host) == "*" ? "127.0.0.1" : host;
    const net::Fd here = std::move(net::connect_tcp(to, port, base::deadline_after(60s)).value());
    net::Fd there;
    while (!there.valid()) {
      there = net::Fd(::accept4(listening.unchecked().get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
    CHECK(net::peer_user(here.get()) == geteuid());
    CHECK(net::peer_user(there.get()) == geteuid());
  }
}

namespace {

// Acts as a fake rank 0 that does not know the token.
void direct_somewhere(RawRank& fake, int variant) {
  REQUIRE(fake.receive());  // the hello
  const rpc::identity::Self self{0, wire::Trust::kToken, 0, {}};
  wire::Hello own{HelloPurpose::kJoin, self.trust, 0, 0, 0, {}, {}};
  const wire::Directory directory{{{"w0", {"127.0.0.1", 9, "", ""}}, {"w1", {}}}, {}, "a secret"};
  if (variant != 0) {
    fake.send(wire::FrameKind::kHello, wire::encode(own));
    if (!fake.receive()) return;  // the proof, if the rank sends one
  }
  if (variant == 2) fake.send(wire::FrameKind::kProof, wire::Bytes(32, 7));
  fake.send(wire::FrameKind::kDirectory, wire::encode(directory));
}

}  // namespace

TEST_CASE("the directory of a fake rank 0 is not used") {
  const int variant = GENERATE(0, 1, 2);  // the directory first, after a hello, after a bad proof
  net::Fd listener = std::move(net::listen_tcp("localhost", 0).value());
  const int flags = fcntl(listener.get(), F_GETFL);
  fcntl(listener.get(), F_SETFL, flags & ~O_NONBLOCK);
  AgentOptions options = options_for(1, 2, net::local_name(listener.get()).port);
  options.token = "a token of the job";
  Joining one(options, [] { FAIL("it believes the directory"); });
  RawRank fake(net::Fd(::accept(listener.get(), nullptr, nullptr)));
  direct_somewhere(fake, variant);
  const ErrorKind kind = one.result().kind;
  CHECK((kind == ErrorKind::kAuth || kind == ErrorKind::kProtocol));
  CHECK(one.result().rank == 0);
}

TEST_CASE("ranks that meet at rank 0's unix socket do not listen on a port") {
  const std::string name = "@distrain-test-" + std::to_string(getpid());
  AgentOptions options = options_for(0, 3);
  options.rank_0_unix_name = name;
  options.listen_fd = std::move(net::listen_unix(name).value()).release();
  Joining zero(options);
  AgentOptions mine = options_for(1, 3);
  mine.rank_0_unix_name = name;
  Joining one(mine);
  mine.rank = 2;
  Joining two(mine);
  REQUIRE(one.joined());
  REQUIRE(two.joined());
  REQUIRE(zero.joined());
  for (Joining* joining : {&zero, &one, &two}) {
    CHECK(joining->agent().port() == 0);
    CHECK(joining->agent().transport() == "unix");
  }
  CHECK(two.agent().rpc_sync<&add>(1, 2, 3) == 5);
  CHECK(zero.agent().rpc_sync<&add>(2, 2, 3) == 5);
}
