// Tests that RRefs can be passed between ranks and that a value is released with its last RRef.
#include <atomic>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "rref_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;
using rpc::RRef;

namespace {

struct Bundle {
  std::vector<Ref> list;
  std::map<std::string, Ref> by_name;
  std::optional<Ref> maybe;
  std::tuple<int, Ref> pair;
  static constexpr auto kFields =
      std::tuple(&Bundle::list, &Bundle::by_name, &Bundle::maybe, &Bundle::pair);
};

Bundle echo_bundle(const Bundle& bundle) { return bundle; }
int64_t pass_on(rpc::CallContext& context, const Ref& ref, std::vector<int> path) {
  if (path.empty()) return value_of(ref);
  const int next = path.back();
  path.pop_back();
  return context.agent.rpc_sync<&pass_on>(next, ref, path);
}
Ref bring_back(rpc::CallContext& context, const Ref& ref, std::vector<int> path) {
  if (path.empty()) return ref;
  const int next = path.back();
  path.pop_back();
  return context.agent.rpc_sync<&bring_back>(next, ref, path);
}
void drop(const Ref&) {}

void expose_bundles(Agent& agent) {
  expose_tracked(agent);
  agent.expose<&echo_bundle>("echo_bundle");
  agent.expose<&pass_on>("pass_on");
  agent.expose<&bring_back>("bring_back");
  agent.expose<&drop>("drop");
}

}  // namespace

TEST_CASE("an RRef is an argument and a result of any call, from any rank to any rank") {
  rpc::AgentOptions options;
  options.transport = GENERATE("unix", "tcp");
  Cluster cluster(3, expose_bundles, options);
  for (int owner = 0; owner < 3; ++owner) {
    for (int from = 0; from < 3; ++from) {
      for (int to = 0; to < 3; ++to) {
        CAPTURE(owner, from, to);
        Agent& agent = cluster[from];
        const int64_t value = owner * 100 + from * 10 + to;
        const Ref ref = agent.remote_new<Tracked>(owner, value);
        CHECK(ref.owner() == owner);
        CHECK(agent.rpc_sync<&value_of>(to, ref) == value);
        CHECK(agent.rpc_async<&value_of>(to, ref).wait() == value);
        CHECK(agent.remote<&value_of>(to, ref).to_here() == value);
        CHECK(value_of(agent.rpc_sync<&echo>(to, ref)) == value);
        CHECK(value_of(agent.rpc_async<&echo>(to, ref).wait()) == value);
        // remote<&echo>() returns an RRef whose value is an RRef.
        CHECK(value_of(agent.remote<&echo>(to, ref).to_here()) == value);
        const Ref made = agent.rpc_sync<&make>(to, owner, value + 1);
        CHECK(made.owner() == owner);
        CHECK(made.is_owner() == (owner == from));
        CHECK(value_of(made) == value + 1);
      }
    }
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("RRefs may be inside vectors, maps, optionals, tuples and structs") {
  Cluster cluster(4, expose_bundles);
  for (int from = 0; from < 4; ++from) {
    for (int to = 0; to < 4; ++to) {
      Agent& agent = cluster[from];
      Bundle bundle;
      for (int owner = 0; owner < 4; ++owner) {
        bundle.list.push_back(agent.remote_new<Tracked>(owner, owner));
        bundle.list.push_back(bundle.list.back());  // the same RRef twice
      }
      bundle.by_name["x"] = bundle.list[2];
      bundle.by_name["y"] = agent.make_rref(Tracked(7));
      bundle.maybe = bundle.list[6];
      bundle.pair = {5, bundle.list[4]};
      Bundle back = agent.rpc_sync<&echo_bundle>(to, bundle);
      bundle = Bundle{};
      bundle.pair = {5, back.list[4]};  // an empty RRef cannot be sent
      REQUIRE(back.list.size() == 8);
      for (int64_t i = 0; i < 8; ++i) CHECK(value_of(back.list[static_cast<size_t>(i)]) == i / 2);
      CHECK(value_of(back.by_name.at("x")) == 1);
      CHECK(value_of(back.by_name.at("y")) == 7);
      CHECK(back.by_name.at("y").is_owner());
      CHECK(value_of(*back.maybe) == 3);
      CHECK(value_of(std::get<1>(back.pair)) == 2);
    }
  }
  CHECK(error_of([&] { cluster[0].rpc_sync<&drop>(1, Ref()); }).kind == ErrorKind::kInvalid);
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("an RRef may be dropped before the call that creates its value has run") {
  Cluster cluster(3, expose_bundles);
  for (int i = 0; i < 60; ++i) {
    const int from = i % 3, owner = (i / 3) % 3, other = (i / 9) % 3;
    Agent& agent = cluster[from];
    static_cast<void>(agent.remote_new<Tracked>(owner, i));
    static_cast<void>(agent.remote<&make_by_value>(owner, i));
    static_cast<void>(agent.rpc_async<&drop>(other, agent.remote_new<Tracked>(owner, i)));
    static_cast<void>(agent.remote<&echo>(other, agent.remote_new<Tracked>(owner, i)));
    static_cast<void>(agent.rpc_async<&echo>(other, agent.remote_new<Tracked>(owner, i)));
    static_cast<void>(agent.rpc_async<&make>(other, owner, i));
    static_cast<void>(agent.remote<&make>(other, owner, i));
    // Uses an RRef at once, perhaps before its value exists.
    CHECK(agent.remote_new<Tracked>(owner, i).rpc_sync<&Tracked::get>() == i);
    CHECK(agent.rpc_sync<&value_of>(other, agent.remote<&make_by_value>(owner, i)) == i);
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("a fork may outlive the RRefs that it was forked from") {
  Cluster cluster(4, expose_bundles);
  const std::vector<int> path = {2, 0, 1, 3, 3, 1, 2, 0, 2, 1};
  for (int owner = 0; owner < 4; ++owner) {
    CHECK(cluster[0].rpc_sync<&pass_on>(3, cluster[0].remote_new<Tracked>(owner, owner), path) ==
          owner);
    const Ref back =
        cluster[1].rpc_sync<&bring_back>(2, cluster[1].remote_new<Tracked>(owner, 9), path);
    CHECK(value_of(back) == 9);
    // Each rank keeps one RRef, and `back` is released.
    for (int rank = 0; rank < 4; ++rank) cluster[rank].rpc_sync<&shelve>((rank + 1) % 4, back);
  }
  CHECK(eventually([] { return Tracked::alive == 4; }));  // pass_on() may release values late
  for (int rank = 0; rank < 4; ++rank) {
    Shelf& shelf = cluster[rank].local<Shelf>();
    std::vector<Ref> kept;
    {
      std::lock_guard lock(shelf.mutex);
      kept.swap(shelf.refs);
    }
    REQUIRE(kept.size() == 4);
    for (const Ref& ref : kept) CHECK(value_of(ref) == 9);
    kept.clear();
    if (rank < 3) CHECK(Tracked::alive == 4);
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("an RRef may outlive its agent") {
  Ref user, owned;
  RRef<int64_t> number;
  {
    Cluster cluster(2, expose_bundles);
    user = cluster[0].remote_new<Tracked>(1, 1);
    owned = cluster[0].make_rref(Tracked(2));
    number = cluster[0].remote<&add>(1, 1, 2);
    CHECK(value_of(user) == 1);
  }
  CHECK(user.owner() == 1);
  CHECK(owned.local_value().get() == 2);
  CHECK(error_of([&] { user.rpc_sync<&Tracked::get>(); }).kind == ErrorKind::kCancelled);
  CHECK(error_of([&] { number.to_here(); }).kind == ErrorKind::kCancelled);
  const Ref copy = user;
  user = Ref();
  owned = Ref();
  CHECK(Tracked::alive == 0);
}

TEST_CASE("another thread may drop RRefs while the agents end") {
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::vector<Ref> refs;
    std::thread dropper;
    {
      Cluster cluster(2, expose_bundles);
      for (int i = 0; i < 200; ++i) {
        refs.push_back(cluster[i % 2].remote_new<Tracked>((i / 2) % 2, i));
      }
      for (const Ref& ref : refs) value_of(ref);
      dropper = std::thread([&] {
        for (Ref& ref : refs) {
          ref = Ref();
          std::this_thread::yield();
        }
      });
    }
    dropper.join();
    CHECK(Tracked::alive == 0);
  }
}

TEST_CASE("many threads share and drop RRefs for a second") {
  Cluster cluster(4, expose_bundles);
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      const auto rank = [&] { return static_cast<int>(random() % 4); };
      std::vector<Ref> mine;
      try {
        while (!stop) {
          Agent& agent = cluster[rank()];
          // Makes all calls on one agent, because an RRef must be sent by the agent that made it.
          Ref ref = agent.remote_new<Tracked>(rank(), t);
          switch (random() % 7) {
            case 0:
              mine.push_back(agent.rpc_sync<&echo>(rank(), ref));
              break;
            case 1:
              static_cast<void>(agent.remote<&echo>(rank(), ref));
              break;
            case 2:
              static_cast<void>(
                  agent.rpc_async<&pass_on>(rank(), ref, std::vector<int>{rank(), rank()}));
              break;
            case 3:
              failures += agent.rpc_sync<&value_of>(rank(), ref) != t;
              break;
            case 4:
              mine.push_back(
                  agent.rpc_sync<&bring_back>(rank(), ref, std::vector<int>{rank(), rank()}));
              break;
            case 5:
              mine.push_back(agent.remote<&echo>(rank(), ref).to_here());
              break;
            case 6:
              mine.push_back(agent.rpc_sync<&make>(rank(), rank(), t));
              break;
          }
          if (mine.size() > 20) {
            for (const Ref& one : mine) failures += value_of(one) != t;
            mine.clear();
          }
        }
      } catch (const base::Exception& e) {
        UNSCOPED_INFO(e.what());
        ++failures;
      }
    });
  }
  std::this_thread::sleep_for(1s);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  check_all_gone_and_shutdown(cluster);
}
