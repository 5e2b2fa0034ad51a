// ctest: timeout=120
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using base::ErrorKind;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::error_of;

namespace {

// A value whose life is counted, over all agents of this process.
struct Tracked {
  using Constructor = Tracked(int64_t value);
  explicit Tracked(int64_t v) : value(v) { ++alive; }
  Tracked(const Tracked& other) : value(other.value) { ++alive; }
  ~Tracked() { --alive; }
  int64_t get() const { return value; }
  int64_t value;
  static inline std::atomic<int> alive{0};
};
using Ref = RRef<Tracked>;

struct Bundle {
  std::vector<Ref> list;
  std::map<std::string, Ref> by_name;
  std::optional<Ref> maybe;
  std::tuple<int, Ref> pair;
  static constexpr auto kFields =
      std::tuple(&Bundle::list, &Bundle::by_name, &Bundle::maybe, &Bundle::pair);
};

// What a rank holds on to.
struct Shelf {
  std::mutex mutex;
  std::vector<Ref> refs;
};

int64_t value_of(const Ref& ref) {
  return ref.is_owner() ? ref.local_value().get() : ref.rpc_sync<&Tracked::get>();
}
Ref echo(const Ref& ref) { return ref; }
Ref make(rpc::CallContext& context, int owner, int64_t value) {
  return context.agent.remote_new<Tracked>(owner, value);
}
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
void shelve(rpc::CallContext& context, const Ref& ref) {
  Shelf& shelf = context.agent.local<Shelf>();
  std::lock_guard lock(shelf.mutex);
  shelf.refs.push_back(ref);
}
int64_t fail_with(const Ref&) { throw std::runtime_error("broke after reading"); }
// Held up until the test opens the gate, so that no deadline depends on the machine's speed.
std::atomic<bool> g_gate{false};
void wait_at_gate() {
  while (!g_gate) std::this_thread::sleep_for(1ms);
}
Ref echo_late(const Ref& ref) {
  wait_at_gate();
  return ref;
}
void nap(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
int64_t with_tensor(const Ref& ref, const at::Tensor&) { return value_of(ref); }
std::tuple<Ref, at::Tensor> result_that_cannot_travel(const Ref& ref) {
  return {ref, at::ones({2}, at::kComplexHalf)};
}
Tracked make_by_value(int64_t value) { return Tracked(value); }
Tracked fail_to_make(int64_t) { throw base::Exception(ErrorKind::kBadData, "cannot be made"); }
void not_exposed_there(const Ref&) {}
Tracked also_not_there(int64_t value) { return Tracked(value); }
int64_t add(int64_t a, int64_t b) { return a + b; }

void setup(Agent& agent) {
  agent.expose_class<Tracked>("Tracked");
  agent.expose<&Tracked::get>("Tracked.get");
  agent.expose<&value_of>("value_of");
  agent.expose<&echo>("echo");
  agent.expose<&make>("make");
  agent.expose<&echo_bundle>("echo_bundle");
  agent.expose<&pass_on>("pass_on");
  agent.expose<&bring_back>("bring_back");
  agent.expose<&drop>("drop");
  agent.expose<&shelve>("shelve");
  agent.expose<&fail_with>("fail_with");
  agent.expose<&wait_at_gate>("wait_at_gate");
  agent.expose<&echo_late>("echo_late");
  agent.expose<&nap>("nap");
  agent.expose<&with_tensor>("with_tensor");
  agent.expose<&result_that_cannot_travel>("result_that_cannot_travel");
  agent.expose<&make_by_value>("make_by_value");
  agent.expose<&fail_to_make>("fail_to_make");
  agent.expose<&add>("add");
  if (agent.rank() == 0) {
    agent.expose<&not_exposed_there>("not_exposed_there");
    agent.expose<&also_not_there>("also_not_there");
  }
  agent.provide(std::make_shared<Shelf>());
}

template <class F>
bool eventually(F holds, std::chrono::milliseconds limit = 10s) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// Nothing is left of any RRef, without a shutdown; `but` is lost.
void check_all_gone(Cluster& cluster, int but = -1) {
  const auto live = [&] {
    std::vector<size_t> counts;
    for (int rank = 0; rank < cluster.size(); ++rank) {
      counts.push_back(rank == but ? 0 : cluster[rank].live_rrefs());
    }
    return counts;
  };
  eventually(
      [&] { return live() == std::vector<size_t>(live().size(), 0) && Tracked::alive == 0; });
  CHECK(live() == std::vector<size_t>(live().size(), 0));
  CHECK(Tracked::alive == 0);
}

void check_all_gone_and_shutdown(Cluster& cluster) {
  check_all_gone(cluster);
  cluster.shutdown();
  check_all_gone(cluster);
}

}  // namespace

TEST_CASE("an RRef is an argument and a result of any call, from any rank to any rank") {
  rpc::AgentOptions options;
  options.transport = GENERATE("unix", "tcp");
  Cluster cluster(3, setup, options);
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
        // The value of this RRef is an RRef.
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

TEST_CASE("RRefs travel inside vectors, maps, optionals, tuples and structs") {
  Cluster cluster(4, setup);
  for (int from = 0; from < 4; ++from) {
    for (int to = 0; to < 4; ++to) {
      Agent& agent = cluster[from];
      Bundle bundle;
      for (int owner = 0; owner < 4; ++owner) {
        bundle.list.push_back(agent.remote_new<Tracked>(owner, owner));
        bundle.list.push_back(bundle.list.back());  // the same one twice
      }
      bundle.by_name["x"] = bundle.list[2];
      bundle.by_name["y"] = agent.make_rref(Tracked(7));
      bundle.maybe = bundle.list[6];
      bundle.pair = {5, bundle.list[4]};
      Bundle back = agent.rpc_sync<&echo_bundle>(to, bundle);
      bundle = Bundle{};
      bundle.pair = {5, back.list[4]};  // an empty RRef cannot travel
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

TEST_CASE("an RRef that is dropped before the call that makes it has run") {
  Cluster cluster(3, setup);
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
    // Used at once, perhaps before the value is there.
    CHECK(agent.remote_new<Tracked>(owner, i).rpc_sync<&Tracked::get>() == i);
    CHECK(agent.rpc_sync<&value_of>(other, agent.remote<&make_by_value>(owner, i)) == i);
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("a fork of a fork of a fork, its parents long gone") {
  Cluster cluster(4, setup);
  const std::vector<int> path = {2, 0, 1, 3, 3, 1, 2, 0, 2, 1};
  for (int owner = 0; owner < 4; ++owner) {
    CHECK(cluster[0].rpc_sync<&pass_on>(3, cluster[0].remote_new<Tracked>(owner, owner), path) ==
          owner);
    const Ref back =
        cluster[1].rpc_sync<&bring_back>(2, cluster[1].remote_new<Tracked>(owner, 9), path);
    CHECK(value_of(back) == 9);
    // Each rank keeps one; the creator drops its own.
    for (int rank = 0; rank < 4; ++rank) cluster[rank].rpc_sync<&shelve>((rank + 1) % 4, back);
  }
  CHECK(eventually([] { return Tracked::alive == 4; }));  // those of pass_on go in their time
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

TEST_CASE("RRefs of calls that fail are let go") {
  Cluster cluster(3, setup);
  for (int owner = 0; owner < 3; ++owner) {
    for (int to = 0; to < 3; ++to) {
      CAPTURE(owner, to);
      Agent& agent = cluster[0];
      const Ref ref = agent.remote_new<Tracked>(owner, 1);
      CHECK(error_of([&] { agent.rpc_sync<&fail_with>(to, ref); }).kind ==
            ErrorKind::kRemoteFailed);
      if (to != 0) {
        CHECK(error_of([&] { agent.rpc_sync<&not_exposed_there>(to, ref); }).kind ==
              ErrorKind::kNotFound);
      }
      // The tensor cannot be sent, which shows after the RRef was written.
      const at::Tensor csr = at::eye(2).to_sparse_csr();
      CHECK(error_of([&] { agent.rpc_sync<&with_tensor>(to, ref, csr); }).kind ==
            ErrorKind::kInvalid);
      if (to != 0) {
        const at::Tensor half = at::ones({2}, at::kComplexHalf);
        CHECK(error_of([&] { agent.rpc_sync<&with_tensor>(to, ref, half); }).kind ==
              ErrorKind::kInvalid);
        CHECK(error_of([&] { agent.rpc_sync<&result_that_cannot_travel>(to, ref); }).kind ==
              ErrorKind::kInvalid);
      }
      CHECK(value_of(ref) == 1);
    }
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("a call that cannot be sent does not wait for an answer") {
  Cluster cluster(2, setup);
  Ref ref = cluster[0].make_rref(Tracked(1));
  const auto began = std::chrono::steady_clock::now();
  CHECK(error_of([&] {
          cluster[0].rpc_sync<&with_tensor>(rpc::To(1).without_deadline(), ref,
                                            at::ones({2}, at::kComplexHalf));
        }).kind == ErrorKind::kInvalid);
  ref = Ref();
  cluster.shutdown();  // waits for calls that wait
  CHECK(std::chrono::steady_clock::now() - began < 5s);
}

TEST_CASE("RRefs of calls whose caller has given up are let go") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(3, setup, options);
  for (int owner = 0; owner < 3; ++owner) {
    for (int to = 0; to < 3; ++to) {
      CAPTURE(owner, to);
      Agent& agent = cluster[0];
      {
        // The reply with the RRef comes when nobody waits for it any more.
        const Ref ref = agent.remote_new<Tracked>(owner, 1);
        CHECK(value_of(ref) == 1);
        g_gate = false;
        CHECK(error_of([&] { agent.rpc_sync<&echo_late>(rpc::To(to).timeout(5ms), ref); }).kind ==
              ErrorKind::kDeadline);
        g_gate = true;
      }
      {
        // The call is looked at when its caller has given up and dropped all: the one worker waits.
        Ref ref = agent.remote_new<Tracked>(owner, 1);
        CHECK(value_of(ref) == 1);
        g_gate = false;
        auto held_up = agent.rpc_async<&wait_at_gate>(to);
        auto made = agent.remote<&make_by_value>(rpc::To(to).timeout(5ms), 1);
        CHECK(error_of([&] { agent.rpc_sync<&value_of>(rpc::To(to).timeout(5ms), ref); }).kind ==
              ErrorKind::kDeadline);
        ref = Ref();
        made = Ref();
        g_gate = true;
        held_up.wait();
      }
    }
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("remote() that fails throws where its value is wanted") {
  Cluster cluster(3, setup);
  Agent& agent = cluster[0];
  for (int to = 0; to < 3; ++to) {
    const Ref broken = agent.remote<&fail_to_make>(to, 1);
    const base::Error e = error_of([&] { broken.rpc_sync<&Tracked::get>(); });
    CHECK(e.kind == ErrorKind::kBadData);
    CHECK(e.message == "cannot be made");
    CHECK(e.rank == to);
    // And for those it is shared with.
    CHECK(error_of([&] { agent.rpc_sync<&value_of>((to + 1) % 3, broken); }).kind ==
          ErrorKind::kBadData);
    if (to == 0) continue;
    const RRef<Tracked> unknown = agent.remote<&also_not_there>(to, 1);
    CHECK(error_of([&] { unknown.rpc_sync<&Tracked::get>(); }).kind == ErrorKind::kNotFound);
  }
  const RRef<int64_t> sum = agent.remote<&add>(1, 2, 3);
  CHECK(error_of([&] { agent.remote<&fail_with>(1, Ref()); }).kind == ErrorKind::kInvalid);
  // A reference of the wrong type is an error, not a crash.
  CHECK(error_of([&] { agent.rpc_sync<&value_of>(1, Ref(sum.handle())); }).kind ==
        ErrorKind::kInvalid);
  CHECK(sum.to_here() == 5);
}

TEST_CASE("an owner that dies fails what is asked of its values") {
  Cluster cluster(3, setup);
  const Ref old = cluster[0].remote_new<Tracked>(2, 1);
  CHECK(value_of(old) == 1);
  const Ref shared = cluster[1].rpc_sync<&echo>(2, cluster[1].remote_new<Tracked>(2, 2));
  auto pending = cluster[0].rpc_async<&nap>(rpc::To(2).without_deadline(), 50);
  std::this_thread::sleep_for(5ms);
  cluster.kill(2);
  CHECK(Tracked::alive == 0);
  CHECK_THROWS_AS(pending.wait(), base::Exception);
  eventually([&] {
    return error_of([&] { cluster[0].rpc_sync<&nap>(2, 0); }).kind == ErrorKind::kPeerLost &&
           error_of([&] { cluster[1].rpc_sync<&nap>(2, 0); }).kind == ErrorKind::kPeerLost;
  });
  CHECK(error_of([&] { value_of(old); }).kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { value_of(shared); }).rank == 2);
  const RRef<int64_t> never = cluster[0].remote<&add>(2, 1, 1);
  CHECK(error_of([&] { never.to_here(); }).kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { cluster[0].rpc_sync<&value_of>(1, old); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("a user that dies takes its forks with it") {
  Cluster cluster(4, setup);
  for (int owner : {0, 1}) {
    const Ref direct = cluster[3].remote_new<Tracked>(owner, 1);
    cluster[2].rpc_sync<&shelve>(3, cluster[2].remote_new<Tracked>(owner, 2));
    cluster[owner].rpc_sync<&shelve>(3, cluster[owner].make_rref(Tracked(3)));
    CHECK(value_of(direct) == 1);
    cluster[3].local<Shelf>().refs.push_back(direct);
  }
  // One that rank 0 shares with rank 2 keeps its value.
  const Ref kept = cluster[2].rpc_sync<&make>(3, 0, 4);
  CHECK(eventually([] { return Tracked::alive == 7; }));
  cluster.kill(3);
  CHECK(eventually([] { return Tracked::alive == 1; }));
  CHECK(value_of(kept) == 4);
}

TEST_CASE("an RRef may outlive its agent") {
  Ref user, owned;
  RRef<int64_t> number;
  {
    Cluster cluster(2, setup);
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

TEST_CASE("RRefs are dropped by a thread of their own while the agents end") {
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::vector<Ref> refs;
    std::thread dropper;
    {
      Cluster cluster(2, setup);
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
  Cluster cluster(4, setup);
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
          // An RRef belongs to the agent it was made by.
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
