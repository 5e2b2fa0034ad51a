// ctest: timeout=120
// What bounds the calls that wait on a rank: Note [Credit].
#include <deque>
#include <thread>

#include "call_queue.h"
#include "credit.h"
#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;
using rpc::Allowance;
using rpc::CallsInWork;
using rpc::Credit;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Both ends of a flow, with nothing but a queue between them.
struct Flow {
  explicit Flow(uint64_t window, rpc::Loans& loans)
      : allowance(window, loans,
                  [this](uint64_t bytes, uint64_t lent) { credit.give(bytes, lent); }) {}
  Credit credit{[this](uint64_t bytes, uint64_t returned) { allowance.on_asked(bytes, returned); }};
  Allowance allowance;
};

int64_t size_of(at::Tensor tensor) { return tensor.numel(); }
at::Tensor same(at::Tensor tensor) { return tensor; }
int64_t length_of(std::string text) { return static_cast<int64_t>(text.size()); }

std::atomic<int> g_runs{0};

void count_run() { ++g_runs; }

// What answers the calls of keep().
struct Kept {
  std::mutex mutex;
  std::vector<std::shared_ptr<base::Promise<int64_t>>> answers;
  bool is_over = false;

  void answer_all() {
    std::vector<std::shared_ptr<base::Promise<int64_t>>> all;
    {
      std::lock_guard lock(mutex);
      is_over = true;
      all.swap(answers);
    }
    for (const auto& answer : all) answer->set(1);
  }
};

// Holds its argument, and no thread, until Kept::answer_all().
base::Future<int64_t> keep(rpc::CallContext& call, at::Tensor) {
  const auto answer = std::make_shared<base::Promise<int64_t>>();
  Kept& kept = *call.agent.shared<Kept>();
  std::lock_guard lock(kept.mutex);
  if (kept.is_over) {
    answer->set(1);
  } else {
    kept.answers.push_back(answer);
  }
  return answer->future();
}

bool waits_for_room(const Agent& agent) {
  for (const rpc::Wait& wait : agent.waits()) {
    if (wait.what.find("room on rank 1") != std::string::npos) return true;
  }
  return false;
}

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
  agent.expose<&keep>("keep");
  agent.expose<&count_run>("count_run");
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
  CHECK(late.error().kind == ErrorKind::kOverloaded);
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

TEST_CASE("a loan for a call that was given up is there for others") {
  rpc::Loans loans(8 * kMiB);
  uint64_t on_its_way = 0;
  Allowance allowance(kMiB, loans, [&](uint64_t bytes, uint64_t lent) {
    CHECK(bytes == lent);
    on_its_way += bytes;
  });
  std::vector<std::pair<uint64_t, uint64_t>> asked;
  Credit late{[&](uint64_t bytes, uint64_t returned) { asked.emplace_back(bytes, returned); }};
  CHECK_FALSE(late.take(5 * kMiB, base::deadline_after(1ms)).ok());
  CHECK(asked == std::vector<std::pair<uint64_t, uint64_t>>{{5 * kMiB, 0}, {0, 0}});
  allowance.open();
  allowance.on_asked(5 * kMiB, 0);
  CHECK(on_its_way == 4 * kMiB);
  CHECK_FALSE(loans.lend(5 * kMiB));
  late.give(on_its_way, on_its_way);  // it crosses with the word that nobody waits
  CHECK(asked.back() == std::pair<uint64_t, uint64_t>{0, 4 * kMiB});
  CHECK_FALSE(allowance.on_asked(0, 0));
  CHECK(allowance.on_asked(0, 4 * kMiB));
  CHECK(loans.lend(8 * kMiB));
  CHECK(late.try_take(kMiB));  // what is its own it has kept
  CHECK_FALSE(late.try_take(1));
}

TEST_CASE("a loan that is paid back as its borrower asks again is there for others") {
  rpc::Loans loans(8 * kMiB);
  Allowance allowance(256 * kMiB, loans, [](uint64_t, uint64_t) {});
  allowance.open();
  CHECK_FALSE(allowance.on_asked(260 * kMiB, 0));  // and is lent 4
  CHECK_FALSE(allowance.on_asked(0, 0));           // others take that
  CHECK_FALSE(loans.lend(5 * kMiB));
  REQUIRE(allowance.on_arrived(10 * kMiB));
  CHECK_FALSE(allowance.on_begun(10 * kMiB));  // too little for a word of its own
  SECTION("for what it may have") { CHECK(allowance.on_asked(5 * kMiB, 0)); }
  SECTION("for more") {
    // The loan goes on. It is not lent twice.
    CHECK_FALSE(allowance.on_asked(260 * kMiB, 0));
    CHECK_FALSE(loans.lend(5 * kMiB));
    CHECK(allowance.on_asked(0, 4 * kMiB));
  }
  CHECK(loans.lend(8 * kMiB));
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
  while (!waits_for_room(cluster[0])) std::this_thread::sleep_for(1ms);
  CHECK(sent == 3);  // of 2 MiB and a little each
  // Others are not kept from it: replies and words need no credit.
  CHECK(cluster[1].rpc_sync<&add>(0, 1, 2) == 3);
  g_gate = true;
  caller.join();
  for (const auto& size : sizes) CHECK(size.wait() == 2 << 18);
  held_up.wait();
  cluster.shutdown();
}

TEST_CASE("calls that have begun and wait for others stay within the budget, too") {
  rpc::AgentOptions options;
  options.peer_budget = 4 * kMiB;
  options.total_budget = 16 * kMiB;
  Cluster cluster(2, expose_all, options);
  constexpr int kCalls = 40;
  std::atomic<int> sent{0};
  std::vector<base::Future<int64_t>> answers;
  std::thread caller([&] {
    for (int i = 0; i < kCalls; ++i) {
      answers.push_back(cluster[0].rpc_async<&keep>(rpc::To(1).without_deadline(), mebibytes(1)));
      ++sent;
    }
  });
  while (sent < kCalls && !waits_for_room(cluster[0])) std::this_thread::sleep_for(1ms);
  CHECK(sent < 20);  // 16 MiB are in work, and as much as its window waits
  // What needs no credit goes on.
  CHECK(cluster[1].rpc_sync<&add>(0, 1, 2) == 3);
  cluster[1].shared<Kept>()->answer_all();
  caller.join();
  for (const auto& answer : answers) CHECK(answer.wait() == 1);
  cluster.shutdown();
}

TEST_CASE("a call that finds no room in its time is overloaded") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  options.peer_budget = 8 * kMiB;
  Cluster cluster(2, expose_all, options);
  g_gate = false;
  auto held_up = cluster[0].rpc_async<&wait_at_gate>(1);
  wait_for_call_at_gate();
  auto first = cluster[0].rpc_async<&size_of>(rpc::To(1).without_deadline(), mebibytes(7));
  const base::Error error = error_of(
      [&] { cluster[0].rpc_async<&size_of>(rpc::To(1).timeout(50ms), mebibytes(7)).wait(); });
  CHECK(error.kind == ErrorKind::kOverloaded);
  CHECK(error.rank == 1);
  CHECK(contains(error.message, "rank 1 (w1) had no room for this call in time"));
  g_gate = true;
  CHECK(first.wait() == 7 << 18);
  held_up.wait();
  cluster.shutdown();
}

TEST_CASE("messages that nobody has opened a channel for are bounded") {
  rpc::AgentOptions options;
  options.total_budget = 4 * kMiB;
  Cluster cluster(2, expose_all, options);
  g_gate = false;
  auto held_up = cluster[1].rpc_async<&wait_at_gate>(0);
  wait_for_call_at_gate();
  const std::vector<uint8_t> bytes(kMiB);
  const std::span<const uint8_t> piece(bytes);
  for (uint16_t i = 0; i < 8; ++i) {
    auto& channel = cluster[0].open_channel(static_cast<uint16_t>(20 + i % 3));
    static_cast<void>(error_of([&] { channel.send(1, {}, {&piece, 1}, {}); }));  // the last ones
  }
  const base::Error error = error_of([&] { held_up.wait(); });
  CHECK(error.kind == ErrorKind::kOverloaded);
  CHECK(error.rank == 1);
  CHECK(contains(error.message, "which nobody has opened on rank 1 yet"));
  g_gate = true;
}

TEST_CASE("messages that came early are no debt once their channel is open") {
  rpc::AgentOptions options;
  options.total_budget = 4 * kMiB;
  Cluster cluster(2, expose_all, options);
  const std::vector<uint8_t> bytes(kMiB);
  const std::span<const uint8_t> piece(bytes);
  for (uint16_t round = 0; round < 4; ++round) {
    const auto number = static_cast<uint16_t>(20 + round);
    for (int i = 0; i < 3; ++i) cluster[0].open_channel(number).send(1, {}, {&piece, 1}, {});
    CHECK(cluster[0].rpc_sync<&add>(1, 1, 2) == 3);  // they have come
    std::atomic<int> heard{0};
    cluster[1].open_channel(number).set_handler({[&](rpc::ChannelMessage) { ++heard; }, {}});
    CHECK(heard == 3);
    cluster[1].open_channel(number).set_handler({});
  }
  cluster.shutdown();
}

TEST_CASE("calls in work keep their credit when too many hold too much, until there is room") {
  std::vector<std::pair<int, uint64_t>> given;
  CallsInWork calls(10, [&](int from, uint64_t bytes) { given.emplace_back(from, bytes); });
  CallsInWork::Call a, b, c, d, none;
  calls.begin(a, 1, 20);  // larger than all room, but alone
  CHECK(given == std::vector<std::pair<int, uint64_t>>{{1, 20}});
  calls.begin(b, 2, 6);
  calls.begin(c, 3, 5);
  calls.begin(none, 3, 0);
  calls.begin(d, 4, 4);
  CHECK(given.size() == 1);
  calls.end(c);  // it had its own
  CHECK(given.back() == std::pair<int, uint64_t>{3, 5});
  calls.end(none);
  CHECK(given.size() == 2);
  calls.end(a);
  CHECK(given.size() == 4);
  calls.end(b);
  calls.end(d);
  CHECK(given.size() == 4);
  CallsInWork::Call all;
  calls.begin(all, 5, 10);
  CHECK(given.size() == 5);
}

TEST_CASE("many threads: calls in work give their credit back once each") {
  std::atomic<uint64_t> given{0};
  CallsInWork calls(8, [&](int, uint64_t bytes) { given += bytes; });
  std::atomic<uint64_t> taken{0};
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint64_t i = 0; i < 5000; ++i) {
        CallsInWork::Call first, second;
        calls.begin(first, 0, 1 + (i + thread) % 7);
        calls.begin(second, 0, 1 + i % 5);
        taken += 2 + (i + thread) % 7 + i % 5;
        calls.end(first);
        calls.end(second);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(given == taken);
}

TEST_CASE("a call that waits is found by its rank and id") {
  rpc::CallQueue queue;
  for (const auto& [from, id] : std::vector<std::pair<int, uint64_t>>{
           {1, 7}, {2, 7}, {1, 8}, {1, 8}, {2, 9}, {1, 9}, {3, 1}}) {
    rpc::QueuedCall call;
    call.from = from;
    call.id = id;
    queue.push(std::move(call));
  }
  CHECK_FALSE(queue.take(1, 1));
  CHECK(queue.take(2, 7)->from == 2);
  CHECK_FALSE(queue.take(2, 7));
  CHECK(queue.take(1, 8));  // given twice: the last one is the one
  queue.drop_all_of(3);
  std::vector<std::pair<int, uint64_t>> left;
  while (auto call = queue.pop()) left.emplace_back(call->from, call->id);
  CHECK(left == std::vector<std::pair<int, uint64_t>>{{1, 7}, {1, 8}, {2, 9}, {1, 9}});
}

TEST_CASE("a call that is cancelled before it has left does not leave") {
  rpc::AgentOptions options;
  options.call_delay = 50ms;
  Cluster cluster(2, expose_all, options);
  g_runs = 0;
  auto call = cluster[0].rpc_async<&count_run>(1);
  call.cancel();
  cluster[0].rpc_sync<&count_run>(1);
  CHECK(g_runs == 1);
  cluster.shutdown();
}

TEST_CASE("a call whose time is over before it has left gives its credit back") {
  rpc::AgentOptions options;
  options.call_delay = 50ms;
  options.peer_budget = 2 * kMiB;
  Cluster cluster(2, expose_all, options);
  for (int i = 0; i < 8; ++i) {
    CHECK_THROWS(cluster[0].rpc_sync<&size_of>(rpc::To(1).timeout(20ms), mebibytes(1)));
  }
  CHECK(cluster[0].rpc_sync<&size_of>(1, mebibytes(1)) == 1 << 18);
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
  control.join(1);
  const auto directory = control.receive();
  REQUIRE(directory);
  control.send(wire::FrameKind::kPrepared, no_devices());
  REQUIRE(zero.joined());
  RawRank calls(port);
  const std::string secret = wire::decode_directory(directory->second).secret;
  CHECK(calls.introduce(1, wire::HelloPurpose::kPeer, secret));
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
