// Tests the handshake that Note [Identity] describes, and each field of its messages.
#include <atomic>
#include <cstdlib>
#include <set>
#include <thread>

#include <openssl/crypto.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "distrain/net/socket.h"
#include "handshake.h"
#include "proof.h"
#include "support/catch.h"
#include "support/error_of.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using membership::Credentials;
using membership::Initiator;
using membership::Responder;
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
  return membership::hex({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

// The messages of one handshake, which tests replay on another connection.
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

// Runs in its own process, which the next test starts; does nothing without the environment
// variable. A thread keeps authenticating while exit() runs the exit handlers. exit() calls `look`
// last, after OpenSSL's own handler.
TEST_CASE("a process exits while a thread uses OpenSSL", "[.][exits]") {
  if (!std::getenv("DISTRAIN_TEST_EXIT")) return;
  static base::Error refused;
  static std::thread thread;
  static bool worked_before = false;
  static std::atomic<int> rounds_left{-1};  // negative: endless
  const auto look = [] {
    rounds_left = 100;
    thread.join();
    _exit(worked_before && refused.kind == ErrorKind::kCancelled ? 0 : 1);
  };
  std::atexit(look);
  membership::set_up_openssl();
  std::atexit([] {  // simulates the destructor of a static agent
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
  char program[] = "unit_membership";
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

// The HMACs are test cases 1 and 2 of RFC 4231, whose keys HMAC pads with zeros. The derived keys
// were computed with Python's hmac module. derive_key() replaces an empty secret by one zero byte.
TEST_CASE("keys and proofs match the RFCs") {
  membership::Key key{};
  std::fill_n(key.begin(), 20, uint8_t{0x0b});
  const std::string hi = "Hi There";
  const auto bytes = [](const std::string& text) {
    return std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  };
  CHECK(hex(membership::authenticate(key, {bytes(hi)})) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  key = {'J', 'e', 'f', 'e'};
  const std::string what = "what do ya want ", nothing = "for nothing?";
  CHECK(hex(membership::authenticate(key, {bytes(what), bytes(nothing)})) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(membership::derive_key("secret", "join initiator")) ==
        "d54289cbe39a6a049004f25419c4d03a1ec78518ac078c77edbee0895e2e090f");
  CHECK(hex(membership::derive_key("", "join initiator")) ==
        "dd32e40be3fe2e071c25a0ff5d3cc853722d733143fc3380fc428a0d0e34f028");
}

TEST_CASE("two sides that know the same secret accept each other") {
  std::set<wire::Bytes> hellos;
  for (int i = 0; i < 100; ++i) {
    for (const auto purpose : {HelloPurpose::kJoin, HelloPurpose::kPeer}) {
      const Words words = exchange(purpose);
      CHECK(hellos.insert(words.initiator_hello).second);  // each nonce is new
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
    CHECK(kind_of([&] { honest.check(membership::authenticate({}, {fake.hello()})); }) ==
          ErrorKind::kAuth);
  }
}

TEST_CASE("messages of another connection, or of the other side, are not a proof") {
  for (const auto purpose : {HelloPurpose::kJoin, HelloPurpose::kPeer}) {
    const Words before = exchange(purpose);
    // A responder refuses a replayed proof, because it has sent a new nonce.
    const Responder responder(of(0), wire::decode_hello(before.initiator_hello));
    CHECK(kind_of([&] { responder.check(before.initiator_proof); }) == ErrorKind::kAuth);
    // An initiator refuses a replayed proof.
    Initiator initiator(of(1), purpose);
    initiator.answer(before.responder_hello);
    CHECK(kind_of([&] { initiator.check(before.responder_proof); }) == ErrorKind::kAuth);
    // A reflection attack: the initiator receives its own messages.
    Initiator alone(of(1), purpose);
    const wire::Proof own = alone.answer(alone.hello());
    CHECK(kind_of([&] { alone.check(own); }) == ErrorKind::kAuth);
    // An initiator refuses the hello of a handshake for the other purpose.
    const auto other = purpose == HelloPurpose::kJoin ? HelloPurpose::kPeer : HelloPurpose::kJoin;
    Initiator swapped(of(1), other);
    CHECK(kind_of([&] { swapped.answer(before.responder_hello); }) == ErrorKind::kAuth);
  }
}

TEST_CASE("each bit of both hellos and of both proofs is checked") {
  for (const auto purpose : {HelloPurpose::kJoin, HelloPurpose::kPeer}) {
    const size_t bits = exchange(purpose).initiator_hello.size() * 8;
    REQUIRE(bits == 66 * 8);
    // Flips each bit of the initiator's hello before the responder receives it.
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
    // Flips each bit of the responder's hello before the initiator receives it.
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
  const membership::Identity self = of(0).self;
  wire::Hello other{HelloPurpose::kJoin, self.trust, 1, self.generation, 0, self.job_id, {}};
  CHECK_FALSE(membership::mismatch(self, other));
  other.job_id = {};  // the rank does not know its job ID yet
  CHECK_FALSE(membership::mismatch(self, other));
  other.job_id = {9};
  CHECK(contains(membership::mismatch(self, other)->message, "rank 1 belongs to job 09000000"));
  other.job_id = self.job_id;
  other.generation = 3;
  CHECK(contains(membership::mismatch(self, other)->message, "is of generation 3, rank 0 of 4"));
  // For a wrong proof, the text names the generations, because a restart may have changed them.
  const auto why = [&] { return membership::why_not_trusted(self, other); };
  CHECK(contains(why(),
                 "another token than rank 0 (it says that it is of generation 3, rank 0 of 4)"));
  other.purpose = HelloPurpose::kPeer;
  CHECK(contains(why(), "this job's ranks (it says that it is of generation 3, rank 0 of 4)"));
  other.generation = wire::kAnyGeneration;  // the rank does not know its generation
  CHECK_FALSE(membership::mismatch(self, other));
  CHECK_FALSE(contains(why(), "generation"));
}

TEST_CASE("claims of strangers use little memory and print few lines") {
  membership::Refusals refusals(3);
  int told = 0;
  for (int rank = -5000; rank < 5000; ++rank) {
    const std::string text = "refused rank " + std::to_string(rank);
    told += refusals.add(rank, text, text) ? 1 : 0;
  }
  CHECK(told == 8 + 2);  // 8 unknown ranks, and ranks 1 and 2
  CHECK(refusals.text() == "refused rank 1; refused rank 2; refused rank 4999");
  CHECK_FALSE(refusals.add(1, "refused rank 1", "again"));
  CHECK(refusals.text() == "again; refused rank 2; refused rank 4999");
  CHECK(refusals.add(1, "another reason", ""));
  refusals.forget(1);  // the rank has joined
  CHECK(refusals.text() == "refused rank 2; refused rank 4999");
}

TEST_CASE("the user of the other end of a loopback connection is known") {
  for (const char* host : {"127.0.0.1", "localhost", "::1", "*"}) {
    const base::Result<net::Fd> listening =
        net::listen_tcp(std::string(host) == "*" ? "" : host, 0);
    if (!listening.ok()) continue;  // no IPv6 on this machine
    const uint16_t port = net::local_name(listening.unchecked().get()).port;
    const std::string to = std::string(host) == "*" ? "127.0.0.1" : host;
    const net::Fd here = std::move(
        net::connect_tcp(to, port, base::deadline_after(std::chrono::seconds(60))).value());
    net::Fd there;
    while (!there.valid()) {
      there = net::Fd(::accept4(listening.unchecked().get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
    CHECK(net::peer_user(here.get()) == geteuid());
    CHECK(net::peer_user(there.get()) == geteuid());
  }
}
