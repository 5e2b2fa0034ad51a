// ctest: timeout=120
// What bounds the calls that wait on a rank: Note [Credit].
#include <deque>
#include <thread>

#include "../src/rpc/credit.h"
#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;
using rpc::Allowance;
using rpc::Credit;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Both ends of a flow, with nothing but a queue between them.
struct Flow {
  explicit Flow(uint64_t window, rpc::Loans& loans)
      : allowance(window, loans, [this](uint64_t bytes) { credit.give(bytes); }) {}
  Credit credit{[this](uint64_t bytes) { allowance.on_asked(bytes); }};
  Allowance allowance;
};

int64_t size_of(at::Tensor tensor) { return tensor.numel(); }
at::Tensor same(at::Tensor tensor) { return tensor; }
int64_t length_of(std::string text) { return static_cast<int64_t>(text.size()); }

std::atomic<int> g_in_flood{0};

// Takes all workers of both ranks, then sends its caller far more than that has room for.
int64_t flood(rpc::CallContext& call, int workers) {
  for (++g_in_flood; g_in_flood < workers;) std::this_thread::sleep_for(1ms);
  std::vector<base::Future<int64_t>> sizes;
  for (int i = 0; i < 6; ++i) {
    sizes.push_back(call.agent.rpc_async<&size_of>(rpc::To(call.caller.rank).without_deadline(),
                                                   at::ones({1 << 18})));
  }
  int64_t all = 0;
  for (const auto& size : sizes) all += size.wait();
  return all;
}

void expose_all(Agent& agent) {
  setup(agent);
  agent.expose<&flood>("flood");
  agent.expose<&wait_at_gate>("wait_at_gate");
  agent.expose<&size_of>("size_of");
  agent.expose<&length_of>("length_of");
  agent.expose<&same>("same");
}

at::Tensor mebibytes(int64_t count) { return at::ones({count << 18}); }

}  // namespace

TEST_CASE("a caller waits for credit, which comes back as calls begin") {
  rpc::Loans loans(64 * kMiB);
  Flow flow(4 * kMiB, loans);
  flow.allowance.open();
  REQUIRE(flow.credit.take(3 * kMiB, base::kNever).ok());
  REQUIRE(flow.allowance.on_arrived(3 * kMiB));
  const base::Status late = flow.credit.take(2 * kMiB, base::deadline_after(5ms));
  CHECK(late.error().kind == ErrorKind::kDeadline);
  std::thread other([&] { CHECK(flow.credit.take(2 * kMiB, base::kNever).ok()); });
  while (!flow.credit.waiting_since()) std::this_thread::yield();
  flow.allowance.on_begun(3 * kMiB);
  other.join();
  CHECK_FALSE(flow.credit.waiting_since());
}

TEST_CASE("a call that needs more than all credit is lent the rest, and it comes back") {
  rpc::Loans loans(8 * kMiB);
  Flow flow(4 * kMiB, loans);
  Flow other(4 * kMiB, loans);
  flow.allowance.open();
  other.allowance.open();
  for (int i = 0; i < 3; ++i) {
    REQUIRE(flow.credit.take(64 * kMiB, base::deadline_after(60s)).ok());
    REQUIRE(flow.allowance.on_arrived(64 * kMiB));
    // All that may be lent is, so another one waits until it is back.
    CHECK_FALSE(other.credit.take(64 * kMiB, base::deadline_after(1ms)).ok());
    CHECK(flow.allowance.on_begun(64 * kMiB));
    other.allowance.try_again();
    REQUIRE(other.credit.take(64 * kMiB, base::deadline_after(60s)).ok());
    REQUIRE(other.allowance.on_arrived(64 * kMiB));
    CHECK(other.allowance.on_begun(64 * kMiB));
  }
  // Neither has more than its window by now.
  CHECK(flow.credit.take(4 * kMiB, base::deadline_after(60s)).ok());
  CHECK_FALSE(flow.credit.take(1, base::deadline_after(1ms)).ok());
}

TEST_CASE("those who wait for a rank that is lost are told") {
  rpc::Loans loans(64 * kMiB);
  Flow flow(kMiB, loans);
  REQUIRE(flow.credit.take(kMiB, base::kNever).ok());
  std::thread waiting(
      [&] { CHECK(flow.credit.take(kMiB, base::kNever).error().kind == ErrorKind::kPeerLost); });
  while (!flow.credit.waiting_since()) std::this_thread::yield();
  flow.credit.fail(base::Error{ErrorKind::kPeerLost, "gone", 1, {}});
  waiting.join();
  CHECK(flow.credit.take(1, base::kNever).error().kind == ErrorKind::kPeerLost);
}

TEST_CASE("many threads, calls of all sizes: credit is neither lost nor made") {
  rpc::Loans loans(4 * kMiB);
  Flow flow(2 * kMiB, loans);
  flow.allowance.open();
  std::mutex mutex;
  std::deque<uint64_t> sent;
  std::atomic<bool> done{false};
  std::atomic<uint64_t> most{0}, waiting{0};
  std::thread worker([&] {
    for (;;) {
      uint64_t bytes = 0;
      {
        std::lock_guard lock(mutex);
        if (!sent.empty()) {
          bytes = sent.front();
          sent.pop_front();
        }
      }
      if (bytes == 0 && done) return;
      if (bytes == 0) {
        std::this_thread::yield();
        continue;
      }
      waiting -= bytes;
      if (flow.allowance.on_begun(bytes)) flow.allowance.try_again();
    }
  });
  std::vector<std::thread> callers;
  for (uint64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (uint64_t i = 0; i < 500; ++i) {
        const uint64_t bytes = (i * 7919 + caller * 104729) % (i % 10 == 0 ? 5 * kMiB : kMiB) + 1;
        if (!flow.credit.take(bytes, base::kNever).ok()) throw std::runtime_error("no credit");
        std::lock_guard lock(mutex);
        waiting += bytes;
        most = std::max<uint64_t>(most, waiting);
        if (!flow.allowance.on_arrived(bytes)) throw std::runtime_error("too much has come");
        sent.push_back(bytes);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  done = true;
  worker.join();
  CHECK(most <= 5 * kMiB);
  CHECK(flow.credit.take(2 * kMiB, base::deadline_after(60s)).ok());
  CHECK_FALSE(flow.credit.take(kMiB, base::deadline_after(1ms)).ok());
}

TEST_CASE("what waits on a rank stays within its budget, and all of it is done") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  options.peer_budget = 8 * kMiB;
  Cluster cluster(2, expose_all, options);
  g_gate = false;
  auto held_up = cluster[0].rpc_async<&wait_at_gate>(1);
  wait_for_call_at_gate();
  std::atomic<int> sent{0};
  std::vector<base::Future<int64_t>> sizes;
  std::thread caller([&] {
    for (int i = 0; i < 12; ++i) {
      sizes.push_back(cluster[0].rpc_async<&size_of>(rpc::To(1).without_deadline(), mebibytes(2)));
      ++sent;
    }
  });
  const auto waits_for_room = [&] {
    for (const rpc::Wait& wait : cluster[0].waits()) {
      if (wait.what.find("room on rank 1") != std::string::npos) return true;
    }
    return false;
  };
  while (!waits_for_room()) std::this_thread::sleep_for(1ms);
  CHECK(sent == 3);  // of 2 MiB and a little each
  // Others are not kept from it: replies and words need no credit.
  CHECK(cluster[1].rpc_sync<&add>(0, 1, 2) == 3);
  g_gate = true;
  caller.join();
  for (const auto& size : sizes) CHECK(size.wait() == 2 << 18);
  held_up.wait();
  cluster.shutdown();
}

TEST_CASE("a call that is larger than all that may wait on a rank is lent all it needs") {
  rpc::AgentOptions options;
  options.peer_budget = 2 * kMiB;
  options.total_budget = 4 * kMiB;
  Cluster cluster(2, expose_all, options);
  for (int i = 0; i < 3; ++i) CHECK(cluster[0].rpc_sync<&size_of>(1, mebibytes(16)) == 16 << 18);
  cluster.shutdown();
}

TEST_CASE("a call that no frame can hold is refused, and takes no credit with it") {
  rpc::AgentOptions options;
  options.peer_budget = 2 * kMiB;
  Cluster cluster(2, expose_all, options);
  const std::string text(wire::Limits{}.max_meta_bytes + 1, 'x');
  for (int i = 0; i < 2; ++i) {
    const base::Error error =
        error_of([&] { static_cast<void>(cluster[0].rpc_sync<&length_of>(1, text)); });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.rank == 0);
  }
  CHECK(cluster[0].rpc_sync<&size_of>(1, mebibytes(1)) == 1 << 18);
  cluster.shutdown();
}

TEST_CASE("two ranks whose functions flood each other with no room left both go on") {
  constexpr int kWorkers = 2;
  rpc::AgentOptions options;
  options.worker_threads = kWorkers;
  options.peer_budget = 2 * kMiB;
  options.total_budget = 4 * kMiB;
  Cluster cluster(2, expose_all, options);
  g_in_flood = 0;
  cluster.on_all([](Agent& agent) {
    std::vector<base::Future<int64_t>> floods;
    for (int i = 0; i < 3 * kWorkers; ++i) {
      floods.push_back(
          agent.rpc_async<&flood>(rpc::To(1 - agent.rank()).without_deadline(), 2 * kWorkers));
    }
    for (const auto& each : floods) expect(each.wait() == 6 << 18, "a wrong size");
  });
  cluster.shutdown();  // by all: nobody is lost
}

TEST_CASE("two ranks that flood each other with calls larger than all room both go on") {
  rpc::AgentOptions options;
  options.worker_threads = 2;
  options.peer_budget = 2 * kMiB;
  Cluster cluster(2, expose_all, options);
  cluster.on_all([](Agent& agent) {
    const int other = 1 - agent.rank();
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (int i = 0; i < 8; ++i) {
          // Larger than all credit, there and back.
          right += agent.rpc_sync<&same>(rpc::To(other).without_deadline(), mebibytes(3)).numel() ==
                   3 << 18;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect(right == 32, "a wrong size");
  });
  cluster.shutdown();
}

TEST_CASE("a call that is cancelled is not run, and what it took is free at once") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  options.peer_budget = 8 * kMiB;
  for (int to = 0; to < 2; ++to) {
    CAPTURE(to);
    Cluster cluster(2, expose_all, options);
    g_gate = false;
    auto held_up = cluster[0].rpc_async<&wait_at_gate>(to);
    wait_for_call_at_gate();
    auto first = cluster[0].rpc_async<&size_of>(rpc::To(to).without_deadline(), mebibytes(7));
    first.cancel();
    CHECK(error_of([&] { first.wait(); }).kind == ErrorKind::kCancelled);
    // While the only worker stands before the gate.
    auto second = cluster[0].rpc_async<&size_of>(rpc::To(to).without_deadline(), mebibytes(7));
    g_gate = true;
    CHECK(second.wait() == 7 << 18);
    held_up.wait();
    held_up.cancel();  // nothing to cancel any more
    cluster.shutdown();
    CHECK(cluster[0].live_rrefs() == 0);
  }
}

TEST_CASE("a rank that sends more calls than it may is lost") {
  rpc::AgentOptions options = options_for(0, 2);
  options.worker_threads = 1;
  options.peer_budget = kMiB;
  Joining zero(options);
  const uint16_t port = zero.agent().port();
  RawRank control(port);
  control.hello(1, wire::HelloPurpose::kJoin);
  const auto directory = control.receive();
  REQUIRE(directory);
  control.send(wire::FrameKind::kPrepared, no_devices());
  REQUIRE(zero.joined());
  RawRank calls(port);
  calls.hello(1, wire::HelloPurpose::kPeer, wire::decode_directory(directory->second).secret);
  zero.agent().expose<&wait_at_gate>("wait_at_gate");
  g_gate = false;
  auto held_up = zero.agent().rpc_async<&wait_at_gate>(0);
  wait_for_call_at_gate();
  auto call = zero.agent().rpc_async<&add>(rpc::To(1).without_deadline(), 1, 2);
  for (int i = 0; i < 4; ++i) calls.send(wire::FrameKind::kCall, wire::Bytes(1 << 20));
  const base::Error e = error_of([&] { call.wait(); });
  CHECK(e.kind == ErrorKind::kProtocol);
  CHECK(e.rank == 1);
  CHECK(contains(e.message, "credit"));
  g_gate = true;
  held_up.wait();
}
