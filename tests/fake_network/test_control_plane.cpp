// ctest: labels=rpc
// Tests whole jobs of simulated ranks: see Note [Simulation].
#include <numeric>
#include <utility>

#include "expect.h"

namespace distrain::fake_network {

using wire::FrameKind;

TEST_CASE("jobs without a fault end well") {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const Result result = expect_good(Scenario::clean(seed, 100));
    CHECK(result.ended_well == 100);
    CHECK(result.failed == 0);
  }
}

TEST_CASE("20 jobs of 100 ranks with random faults satisfy the invariants") {
  for (uint64_t seed = 1; seed <= 20; ++seed) expect_good(Scenario::many(seed, 100));
}

TEST_CASE("50 jobs of any size with random faults satisfy the invariants") {
  for (uint64_t seed = 1; seed <= 50; ++seed) expect_good(Scenario::many(seed, 0));
}

TEST_CASE("20 jobs with losses and returns satisfy the invariants") {
  int lost = 0;
  int returned = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Result result = expect_good(Scenario::tolerant(seed, seed <= 5 ? 100 : 0));
    lost += result.lost;
    returned += result.returned;
  }
  CHECK(lost > 50);
  CHECK(returned > 25);
}

// In the first recipe a rank sends malformed messages. In the next two, rank 0 is stopped or cut
// off while other ranks try to join. In some later ones, ranks connect to a rank that is leaving.
// "tolerant 25": a loss is reported after a replacement has joined. "tolerant 37": two
// replacements refuse each other. "tolerant 5": a replacement joins during the last rounds.
// "tolerant 58": ranks leave because the job cannot continue.
TEST_CASE("runs that once failed satisfy the invariants") {
  for (const char* recipe :
       {"one 1 100 4 2", "many 1279 100", "many 2389 0", "many 1442 100", "many 580 0",
        "many 72 100", "many 378 100", "one 5 100 0 0", "one 9 100 6 2", "tolerant 25 100",
        "tolerant 37 0", "tolerant 5 0", "tolerant 58 0"}) {
    expect_good(Scenario::parse(recipe));
  }
}

TEST_CASE("each kind of fault alone, in each phase, satisfies the invariants") {
  uint64_t seed = 1;
  for (int kind = 0; kind < kFaultKinds; ++kind) {
    for (int phase = 0; phase < 4; ++phase) {
      expect_good(
          Scenario::one(seed++, 30, static_cast<FaultKind>(kind), static_cast<Phase>(phase)));
    }
  }
}

// A rank that is dead, stopped forever or never started reports no error, so 99 ranks fail.
TEST_CASE("all others name the rank that fails") {
  for (const FaultKind kind : {FaultKind::kDie, FaultKind::kStop, FaultKind::kComesLate}) {
    Scenario scenario = Scenario::one(7, 100, kind, Phase::kRunning);
    scenario.longest_start = seconds(0.05);
    scenario.faults[0].a = 42;
    scenario.faults[0].lasts = {};
    const Result result = expect_good(scenario);
    INFO(scenario.text());
    CHECK(result.ended_well == 0);
    CHECK(result.failed == 99);
    CHECK(result.blamed == std::map<int, int>{{42, 99}});
  }
}

TEST_CASE("a run is determined by its seed") {
  const Result first = Simulation(Scenario::many(4, 100)).run();
  const Result again = Simulation(Scenario::parse("many 4 100")).run();
  CHECK(first.digest == again.digest);
  CHECK(first.text() == again.text());
  CHECK(first.digest != Simulation(Scenario::many(5, 100)).run().digest);
  const Result tolerant = Simulation(Scenario::tolerant(1, 100)).run();
  CHECK(tolerant.returned > 0);
  CHECK(tolerant.digest == Simulation(Scenario::parse("tolerant 1 100")).run().digest);
}

TEST_CASE("a deliberate bug is detected by a seed that passes without it") {
  struct Planted {
    Bug bug;
    const char* recipe;
    const char* found;
  };
  const Planted all[] = {
      {Bug::kLossIsNotSpread, "many 9 100", "of rank 0"},
      {Bug::kSilenceIsNotJudged, "one 1 100 1 2", "s late"},
      {Bug::kRoundIsCountedTwice, "clean 1 100", "a round of the end that is not under way"},
      {Bug::kAccuserIsBlamed, "many 11 100", "it is lost"},
      {Bug::kLastWordIsKept, "many 3 100", "of rank 0"},
      {Bug::kNothingIsClosed, "clean 1 100", "connections when it is over"},
      {Bug::kNewcomerGoesEarly, "tolerant 18 100", "is refused by"},
  };
  for (const Planted& planted : all) {
    const Scenario scenario = Scenario::parse(planted.recipe);
    expect_good(scenario);
    const Result result = Simulation(scenario, planted.bug).run();
    INFO(scenario.text());
    REQUIRE_FALSE(result.violations.empty());
    CHECK(result.violations[0].find(planted.found) != std::string::npos);
  }
}

// The shutdown sends more frames per rank: one kFlush per round and direction, and one kLeave.
TEST_CASE("1,000 ranks meet with five frames each") {
  Scenario scenario = Scenario::clean(1, 1000);
  scenario.job.calls_per_rank = 0;
  Result result = expect_good(scenario);
  CHECK(result.ended_well == 1000);
  uint64_t meeting = 0;
  for (const FrameKind kind : {FrameKind::kJoin, FrameKind::kJoined, FrameKind::kDirectory,
                               FrameKind::kPrepared, FrameKind::kGo}) {
    CHECK(result.frames[kind] == 999);
    meeting += result.frames[kind];
  }
  const uint64_t ending = result.frames[FrameKind::kFlush] + result.frames[FrameKind::kLeave];
  CHECK(ending <= 2 * 999 * 26);
  CHECK(result.frames_in_all() == meeting + ending + result.frames[FrameKind::kHeartbeat]);
}

namespace {

// Counts the frames, bytes and rounds of rank 0 of a large job, without a network.
class Counts final : public ControlTransport {
 public:
  void send(Link, membership::Message message) override {
    ++frames[message.kind];
    const auto& body = message.body.shared();
    if (body && bodies.insert(body).second) bytes[message.kind] += body->size();
  }
  void close(Link, bool) override {}
  void on_joined(int) override {}
  void on_directory(const wire::Directory&) override {}
  void on_go(std::vector<wire::RankDevices>) override {}
  void on_failed(const Error& error) override { FAIL(error.message); }
  void on_lost(const membership::Loss& loss) override { lost.push_back(loss.rank); }
  void on_returned(int, const wire::RankDevices&) override {}
  void on_round(uint64_t round, uint64_t) override { rounds = round + 1; }

  std::map<FrameKind, uint64_t> frames;
  std::map<FrameKind, uint64_t> bytes;  // shared buffers count once
  std::set<std::shared_ptr<const wire::Bytes>> bodies;
  uint64_t rounds = 0;
  std::vector<int> lost;
};

}  // namespace

TEST_CASE("the work of rank 0 grows linearly with the number of ranks") {
  constexpr int kRanks = 1000;
  constexpr uint64_t kRounds = 3;
  Counts counts;
  membership::ControlSettings settings;
  settings.job = kSimulatedJob;
  for (int rank = 0; rank < kRanks; ++rank) settings.names.push_back("w" + std::to_string(rank));
  Coordinator coordinator(settings, counts, {});
  coordinator.begin();
  // Each process reserves a rank and then joins as that rank.
  for (int rank = 1; rank < kRanks; ++rank) {
    REQUIRE_FALSE(
        coordinator.reserve_rank(static_cast<Link>(kRanks + rank), {kSimulatedJob, 0, {}, {}}, {}));
  }
  CHECK(coordinator.looks() == kRanks - 1);
  for (int rank = 1; rank < kRanks; ++rank) {
    REQUIRE_FALSE(coordinator.join(static_cast<Link>(rank), rank, {kSimulatedJob, 0, {}, {}}, {}));
  }
  CHECK(counts.frames[FrameKind::kDirectory] == kRanks - 1);
  CHECK(counts.bytes[FrameKind::kDirectory] < 100 * kRanks);
  coordinator.prepared({});
  const wire::Bytes devices = wire::encode(wire::RankDevices{});
  for (int rank = 1; rank < kRanks; ++rank) {
    coordinator.receive(static_cast<Link>(rank), {FrameKind::kPrepared, 0, 0, devices});
  }
  REQUIRE(coordinator.is_running());
  const uint64_t before = coordinator.looks();
  base::Random random({1, 2});
  for (uint64_t round = 0; round < kRounds; ++round) {
    std::vector<int> order(kRanks);
    std::iota(order.begin(), order.end(), 0);
    if (round > 0) {
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    }
    for (const int rank : order) {
      if (rank == 0) {
        coordinator.enter_round(round, 1);
      } else {
        coordinator.receive(static_cast<Link>(rank), {FrameKind::kFlush, round, 1});
      }
    }
  }
  CHECK(counts.rounds == kRounds);
  CHECK(coordinator.looks() - before <= kRounds * 3 * kRanks);
}

TEST_CASE("a connection for calls has heartbeats and a timeout, except within a host") {
  Counts counts;
  membership::ControlSettings settings;
  settings.job = kSimulatedJob;
  settings.names = {"w0", "w1", "w2"};
  settings.peer_timeout = std::chrono::seconds(2);
  const base::TimePoint start{};
  Coordinator coordinator(settings, counts, start);
  coordinator.begin();
  const auto join = [&](Link link, int rank) {
    REQUIRE_FALSE(coordinator.join(link, rank, {kSimulatedJob, 0, {}, {}}, start));
  };
  join(1, 1);
  join(2, 2);
  coordinator.prepared({});
  const wire::Bytes devices = wire::encode(wire::RankDevices{});
  for (const Link link : {1, 2}) coordinator.receive(link, {FrameKind::kPrepared, 0, 0, devices});
  REQUIRE(coordinator.is_running());
  coordinator.open(1, 11, start, true);
  coordinator.open(2, 12, start, false);
  const uint64_t before = counts.frames[FrameKind::kHeartbeat];
  base::TimePoint now = start;
  const auto tick = [&] {
    now += std::chrono::milliseconds(500);
    for (const Link link : {1, 2}) coordinator.heard(link, now);
    coordinator.tick(now);
  };
  for (int i = 0; i < 3; ++i) tick();
  CHECK(counts.frames[FrameKind::kHeartbeat] - before == 3 * 3);
  coordinator.beat(now);  // not due yet
  CHECK(counts.frames[FrameKind::kHeartbeat] - before == 3 * 3);
  CHECK(counts.lost.empty());
  tick();
  CHECK(counts.lost == std::vector{2});
}

TEST_CASE("a rank whose tick is late sends its heartbeats between other events") {
  Counts counts;
  membership::ControlSettings settings;
  settings.job = kSimulatedJob;
  settings.names = {"w0", "w1"};
  settings.peer_timeout = std::chrono::seconds(2);
  const base::TimePoint start{};
  Coordinator coordinator(settings, counts, start);
  coordinator.begin();
  REQUIRE_FALSE(coordinator.join(1, 1, {kSimulatedJob, 0, {}, {}}, start));
  coordinator.tick(start);
  const uint64_t before = counts.frames[FrameKind::kHeartbeat];
  for (int i = 1; i <= 30; ++i) coordinator.beat(start + i * std::chrono::milliseconds(100));
  CHECK(counts.frames[FrameKind::kHeartbeat] - before == 6);  // every 500 ms
  // The tick is late, so this rank has read nothing for a while and judges no rank: on_failed()
  // would fail this test.
  coordinator.tick(start + std::chrono::seconds(3));
}

}  // namespace distrain::fake_network
