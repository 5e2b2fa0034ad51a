// Tests agents with different tokens, jobs or generations, and a fake rank 0.
#include <mutex>
#include <thread>

#include <unistd.h>

#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::AgentOptions;
using wire::HelloPurpose;

namespace {

// Records the errors with which rank 0 refuses ranks.
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
  std::string said;  // the error of the refused rank
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
  for (const auto timeout : {1s, 4s, 16s, 64s}) {  // until the ranks join in time
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
    while (!one.agent().is_admitted() && !one.ended()) std::this_thread::sleep_for(1ms);
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
  while (refusals.first().empty()) std::this_thread::sleep_for(1ms);  // for rank 0's first refusal
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

namespace {

// Sends a directory as a fake rank 0 that does not know the token.
void direct_somewhere(RawRank& fake, int variant) {
  REQUIRE(fake.receive());  // the hello
  const membership::Identity self{0, wire::Trust::kToken, 0, {}};
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
  const int variant = GENERATE(0, 1, 2);  // directory first, after a hello, or after a bad proof
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
