// Tests processes that join without a rank number: rank 0 reserves a free rank for each.
#include <set>

#include "distrain/membership/slot.h"
#include "join_support.h"
#include "rref_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using membership::Slot;

namespace {

rpc::AgentOptions options_for_any(int world_size, uint16_t port) {
  return options_for(membership::kUnassignedRank, world_size, port);
}

// Runs reserve() on its own thread.
class Asking {
 public:
  explicit Asking(const rpc::AgentOptions& options) : slot_(options) {
    rank_ = std::async(std::launch::async, [this] { return slot_.reserve(); });
  }
  int rank() { return rank_.get(); }
  Slot& slot() { return slot_; }

 private:
  Slot slot_;
  std::future<int> rank_;
};

}  // namespace

TEST_CASE("each process that asks gets a rank of its own and joins as that rank") {
  Joining rank_0(options_for(0, 4));
  const uint16_t port = rank_0.agent().port();
  std::vector<std::unique_ptr<Asking>> asking;
  for (int i = 0; i < 3; ++i) asking.push_back(std::make_unique<Asking>(options_for_any(4, port)));
  std::set<int> ranks;
  std::vector<std::unique_ptr<Joining>> others;
  for (const auto& each : asking) {
    const int rank = each->rank();
    ranks.insert(rank);
    others.push_back(std::make_unique<Joining>(options_for(rank, 4, port)));
  }
  CHECK(ranks == std::set<int>{1, 2, 3});
  CHECK(rank_0.joined());
  for (const auto& other : others) CHECK(other->joined());
}

TEST_CASE("a slot is reserved until the process that asked exits") {
  Joining rank_0(options_for(0, 3));
  const uint16_t port = rank_0.agent().port();
  auto first = std::make_unique<Slot>(options_for_any(3, port));
  CHECK(first->reserve() == 1);
  auto second = std::make_unique<Slot>(options_for_any(3, port));
  CHECK(second->reserve() == 2);
  rpc::AgentOptions impatient = options_for_any(3, port);
  impatient.join_timeout = 300ms;
  const base::Error none = error_of([&] { Slot(impatient).reserve(); });
  CHECK(none.kind == ErrorKind::kRendezvous);
  CHECK(
      none.message ==
      "rank 0 had no free place within the join timeout (--join-timeout): each rank of the job has "
      "been taken");
  Asking third(options_for_any(3, port));
  first.reset();
  CHECK(third.rank() == 1);
  // A process that names its rank gets this rank, even if it is reserved for another process.
  Joining rank_2(options_for(2, 3, port));
  Joining rank_1(options_for(1, 3, port));
  CHECK(rank_1.joined());
  CHECK(rank_2.joined());
  CHECK(rank_0.joined());
}

TEST_CASE("a waiting process gets the place of a rank that is lost during the job") {
  Cluster cluster(3, setup);
  cluster[0].go_on_without({1, 2}, 1, "", true);
  const uint16_t port = cluster[0].port();
  Asking waiting(options_for_any(3, port));
  REQUIRE(eventually([&] { return !waiting.slot().waits().empty(); }));
  cluster.kill(2);
  REQUIRE(waiting.rank() == 2);
  cluster.bring_back(2);
  CHECK(cluster[1].rpc_sync<&add>(2, 3, 4) == 7);
  cluster.shutdown();
}

TEST_CASE("a process that asks too early finds rank 0 once it has started") {
  net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
  const uint16_t port = net::local_name(socket.get()).port;
  socket = net::Fd();
  Asking early(options_for_any(2, port));
  Joining rank_0(options_for(0, 2, port));
  CHECK(early.rank() == 1);
  Joining rank_1(options_for(1, 2, port));
  CHECK(rank_0.joined());
}

TEST_CASE("a process that does not fit the job is refused at once") {
  Joining rank_0(options_for(0, 2));
  const uint16_t port = rank_0.agent().port();
  const std::string refuses =
      "rank 0 at localhost:" + std::to_string(port) + " refuses this rank: ";
  rpc::AgentOptions other = options_for_any(2, port);
  other.job = "another";
  base::Error why = error_of([&] { Slot(other).reserve(); });
  CHECK(why.kind == ErrorKind::kRendezvous);
  CHECK(why.message == refuses + "a new rank belongs to 'another', rank 0 to 'distrain'");
  why = error_of([&] { Slot(options_for_any(5, port)).reserve(); });
  CHECK(why.message ==
        refuses + "a new rank expects a world size of 5 (--world-size), rank 0 has 2 ranks");
  other = options_for_any(2, port);
  other.token = "a token that nobody knows";
  why = error_of([&] { Slot(other).reserve(); });
  CHECK(why.kind == ErrorKind::kAuth);
  rank_0.kill();
}

TEST_CASE("a place is free again once the process that asked is dead") {
  Joining rank_0(options_for(0, 2));
  const uint16_t port = rank_0.agent().port();
  {
    RawRank raw(port);
    raw.join(membership::kUnassignedRank);
  }
  CHECK(Slot(options_for_any(2, port)).reserve() == 1);
  rank_0.kill();
}

TEST_CASE("an impossible rank from rank 0 is refused") {
  net::Fd socket = std::move(net::listen_tcp("localhost", 0).value());
  rpc::AgentOptions options = options_for_any(2, net::local_name(socket.get()).port);
  for (const uint64_t given : {uint64_t{0}, uint64_t{4096}, ~uint64_t{0}}) {
    CAPTURE(given);
    auto asked =
        std::async(std::launch::async, [&] { return error_of([&] { Slot(options).reserve(); }); });
    pollfd entry{socket.get(), POLLIN, 0};
    REQUIRE(::poll(&entry, 1, 60000) == 1);
    RawRank raw(net::Fd(::accept(socket.get(), nullptr, nullptr)));
    raw.be_joined(given);
    CHECK(asked.get().kind == ErrorKind::kProtocol);
  }
}

TEST_CASE("an agent needs a rank number") {
  CHECK(error_of([] { rpc::Agent agent(options_for_any(2, 1)); }).kind == ErrorKind::kInvalid);
}

TEST_CASE("a connection for calls needs a rank number") {
  Cluster cluster(2, setup);
  RawRank raw(cluster[0].port());
  CHECK_FALSE(raw.introduce(membership::kUnassignedRank, wire::HelloPurpose::kPeer));
  CHECK(cluster[1].rpc_sync<&add>(0, 1, 1) == 2);
  cluster.shutdown();
}
