// Tests how a rank leaves its job, from any thread and for any reason.
#include <thread>

#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;

namespace {

const base::Error kNotFinite{ErrorKind::kNotFinite, "the loss is NaN", -1, {}};

void abort_here(rpc::CallContext& call) { call.agent.abort(kNotFinite); }

void setup_all(Agent& agent) {
  setup(agent);
  agent.expose<&abort_here>("abort_here");
  agent.expose<&wait_at_gate>("wait_at_gate");
}

void wait_until_in_shutdown(const Agent& agent) {
  const base::TimePoint deadline = base::deadline_after(60s);
  for (;;) {
    for (const rpc::Wait& wait : agent.waits()) {
      if (wait.what.find("the end of") == 0) return;
    }
    if (base::Clock::now() > deadline) throw std::runtime_error("it did not come to its end");
    std::this_thread::sleep_for(1ms);
  }
}

}  // namespace

TEST_CASE("the other ranks get the reason for which a rank leaves, however long it is") {
  const size_t length = GENERATE(size_t{20'000}, size_t{40} << 20);
  Cluster cluster(3, setup_all);
  // Connects all ranks to each other.
  cluster.on_all([](Agent& agent) {
    for (int rank = 0; rank < 3; ++rank) agent.rpc_sync<&add>(rank, 1, 1);
  });
  const std::string text = "the loss is NaN: " + std::string(length, 'x');
  cluster[2].abort({ErrorKind::kNotFinite, text, -1, {}});
  for (int rank = 0; rank < 2; ++rank) {
    const base::Error error = error_of([&] { cluster[rank].shutdown(); });
    CHECK(error.kind == ErrorKind::kNotFinite);
    CHECK(error.rank == 2);
    CHECK(error.message.find("the loss is NaN: xxx") == 0);
  }
}

TEST_CASE("an agent may be aborted while it waits for the others to end") {
  Cluster cluster(2, setup_all);
  base::Error error;
  std::thread ending([&] { error = error_of([&] { cluster[0].shutdown(); }); });
  wait_until_in_shutdown(cluster[0]);
  SECTION("by another thread") { cluster[0].abort(kNotFinite); }
  SECTION("by its own function, which another rank calls") {
    const base::Error told = error_of([&] { cluster[1].rpc_sync<&abort_here>(0); });
    CHECK(told.kind == ErrorKind::kNotFinite);
    CHECK(told.rank == 0);
  }
  SECTION("by its own function, which it has called itself") {
    CHECK_THROWS(cluster[0].rpc_sync<&abort_here>(0));
  }
  ending.join();
  CHECK(error.kind == ErrorKind::kCancelled);
  const base::Error left = error_of([&] { cluster[1].shutdown(); });
  CHECK(left.kind == ErrorKind::kNotFinite);
  CHECK(left.rank == 0);
}

TEST_CASE("waits for other ranks fail when a function ends their agent") {
  Cluster cluster(2, setup_all);
  g_gate = false;
  auto held_up = cluster[0].rpc_async<&wait_at_gate>(rpc::To(1).without_deadline());
  wait_for_call_at_gate();
  static_cast<void>(error_of([&] { cluster[1].rpc_sync<&abort_here>(0); }));
  CHECK(error_of([&] { held_up.wait(); }).kind == ErrorKind::kCancelled);
  g_gate = true;
}

TEST_CASE("a rank that has lost rank 0 waits for no other rank") {
  Cluster cluster(4, setup_all);
  g_gate = false;
  const auto held_up = cluster[1].rpc_async<&wait_at_gate>(rpc::To(2).without_deadline());
  wait_for_call_at_gate();
  cluster.kill(0);
  for (int rank : {2, 3}) {  // rank 2 is connected, rank 3 is not
    const base::Error error = error_of([&] {
      if (rank == 2) return held_up.wait();
      cluster[1].rpc_sync<&nap>(rpc::To(rank).without_deadline(), 600'000);
    });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 0);
  }
  g_gate = true;
}

TEST_CASE("a rank that has left cannot leave again") {
  Cluster cluster(2, setup_all);
  SECTION("after shutdown()") { cluster.shutdown(); }
  SECTION("after abort()") { cluster[0].abort(kNotFinite); }
  CHECK(error_of([&] { cluster[0].shutdown(); }).kind == ErrorKind::kCancelled);
  cluster[0].abort(kNotFinite);
}

TEST_CASE("many threads and a function may end an agent concurrently") {
  for (int i = 0; i < 20; ++i) {
    Cluster cluster(2, setup_all);
    std::vector<std::thread> threads;
    for (int k = 0; k < 3; ++k) {
      threads.emplace_back([&, k] {
        static_cast<void>(error_of([&] {
          if (k == 0) cluster[0].rpc_sync<&abort_here>(0);
          if (k == 1) cluster[0].shutdown();
          cluster[0].abort(kNotFinite);
        }));
      });
    }
    for (std::thread& thread : threads) thread.join();
    cluster.kill(0);
    CHECK(error_of([&] { cluster[1].shutdown(); }).kind == ErrorKind::kNotFinite);
  }
}

TEST_CASE("a continuation of a call that fails with its agent may end the agent, too") {
  Cluster cluster(2, setup_all);
  g_gate = false;
  bool is_told = false;
  auto call = cluster[0].rpc_async<&wait_at_gate>(rpc::To(1).without_deadline());
  wait_for_call_at_gate();
  call.on_complete(cluster[0].inline_executor(), [&](base::Result<base::Unit>& result) {
    cluster[0].abort(kNotFinite);
    is_told = !result.ok();
  });
  cluster[0].abort(kNotFinite);
  CHECK(is_told);
  g_gate = true;
}

namespace {

// An object that an agent owns. Its destructor, called by that of the agent, sets a promise.
struct EndOfAgent {
  explicit EndOfAgent(base::Promise<void>& promise) : told(promise) {}
  ~EndOfAgent() { told.set(); }
  EndOfAgent(const EndOfAgent&) = delete;
  EndOfAgent& operator=(const EndOfAgent&) = delete;
  base::Promise<void>& told;
};

struct LastOwner {
  std::shared_ptr<Agent> agent;
};
void let_go(rpc::CallContext& call) { call.agent.local<LastOwner>().agent = nullptr; }

}  // namespace

TEST_CASE("an agent whose own thread releases its last owner ends on another thread") {
  LastOwner last;
  base::Promise<void> ended;
  Cluster cluster(2, [](Agent& agent) {
    setup_all(agent);
    agent.expose<&let_go>("let_go");
  });
  last.agent = cluster.take_out(0);
  Agent& agent = *last.agent;
  agent.provide(std::make_shared<EndOfAgent>(ended));
  agent.provide(std::shared_ptr<LastOwner>(&last, [](LastOwner*) {}));
  g_gate = false;
  const auto continuation = [&](base::Executor& executor) {
    agent.rpc_async<&wait_at_gate>(1).on_complete(
        executor, [&last](base::Result<base::Unit>&) { last.agent = nullptr; });
    g_gate = true;
  };
  SECTION("a worker, in a continuation") { continuation(agent.executor()); }
  SECTION("a worker, in a function") {
    static_cast<void>(error_of([&] { cluster[1].rpc_sync<&let_go>(0); }));  // may succeed or fail
  }
  SECTION("the loop") { continuation(agent.inline_executor()); }
  CHECK(ended.future().wait_until(base::deadline_after(60s)));
  CHECK(error_of([&] { cluster[1].shutdown(); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("a function that ends its agent on the loop passes on its error") {
  Cluster cluster(2, setup_all);
  g_gate = false;
  base::Promise<void> ended;
  cluster[0].rpc_async<&wait_at_gate>(1).on_complete(cluster[0].inline_executor(),
                                                     [&](base::Result<base::Unit>&) {
                                                       cluster[0].abort(kNotFinite);
                                                       ended.set();
                                                     });
  g_gate = true;
  CHECK(ended.future().wait_until(base::deadline_after(60s)));
  const base::Error left = error_of([&] { cluster[1].shutdown(); });
  CHECK(left.kind == ErrorKind::kNotFinite);
}

TEST_CASE("a rank that has not joined cannot leave") {
  rpc::AgentOptions options = options_for(0, 2);
  options.join_timeout = std::chrono::milliseconds(1);
  Agent agent(options);
  CHECK(error_of([&] { agent.shutdown(); }).kind == ErrorKind::kInvalid);
  CHECK(error_of([&] { agent.join(); }).kind == ErrorKind::kRendezvous);
  CHECK(error_of([&] { agent.shutdown(); }).kind == ErrorKind::kCancelled);  // at once
}

TEST_CASE("an infinite peer timeout disables it") {
  rpc::AgentOptions options;
  options.peer_timeout = std::chrono::nanoseconds::max();
  Cluster cluster(2, setup_all, options);
  CHECK(cluster[0].rpc_sync<&add>(1, 1, 1) == 2);
  cluster.shutdown();
}
