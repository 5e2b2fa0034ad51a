// ctest: timeout=120
// Tests the limits on bytes of waiting calls and of unsent replies: see Note [Credit].
#include <deque>
#include <list>
#include <queue>
#include <thread>

#include "call/call_queue.h"
#include "flow/credit.h"
#include "join_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;
using rpc::Budget;
using rpc::Window;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// The budget from which a receiver grants credit, and the windows in which its senders keep that
// credit, connected without a network.
struct Flows {
  Flows(int ranks, uint64_t total, uint64_t per_peer) : budget(ranks, total, per_peer) {
    for (int rank = 0; rank < ranks; ++rank) {
      windows.push_back(std::make_unique<Window>(
          [this, rank](const Window::Request& request) { tell(budget.ask(rank, request)); }));
    }
    for (int rank = 0; rank < ranks; ++rank) tell(budget.open(rpc::process_number(rank, 0)));
  }
  Window& operator[](int rank) { return *windows[static_cast<size_t>(rank)]; }
  void tell(const Budget::Grants& grants) {
    for (const Budget::Grant& grant : grants) {
      (*this)[rpc::rank_of(grant.to)].grant(grant.bytes, budget.window());
    }
  }
  void send(int rank, uint64_t bytes) {
    REQUIRE((*this)[rank].take(bytes, base::deadline_after(60s)).ok());
    REQUIRE(budget.arrive(rank, bytes));
  }
  bool has_room(int rank, uint64_t bytes) {
    const bool taken = (*this)[rank].take(bytes, base::deadline_after(1ms)).ok();
    if (taken) (*this)[rank].give_back(bytes);
    return taken;
  }
  void begin(int rank, uint64_t bytes) { tell(budget.drop(rpc::process_number(rank, 0), bytes)); }

  Budget budget;
  std::vector<std::unique_ptr<Window>> windows;
};

int64_t size_of(at::Tensor tensor) { return tensor.numel(); }
at::Tensor same(at::Tensor tensor) { return tensor; }
int64_t length_of(std::string text) { return static_cast<int64_t>(text.size()); }

std::atomic<int> g_runs{0};

void count_run() { ++g_runs; }

// Holds the promises of all calls of keep().
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

// Returns a future that Kept::answer_all() completes. Keeps its argument but no thread until then.
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

// Waits until calls of flood() occupy all workers, then sends the caller more than credit allows.
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

TEST_CASE("a caller waits for credit, which returns as calls begin") {
  Flows flows(2, 16 * kMiB, 4 * kMiB);
  flows.send(1, 3 * kMiB);
  const base::Status late = flows[1].take(2 * kMiB, base::deadline_after(5ms));
  CHECK(late.error().kind == ErrorKind::kOverloaded);
  std::thread other([&] { CHECK(flows[1].take(2 * kMiB, base::kNever).ok()); });
  while (!flows[1].waiting_since()) std::this_thread::yield();
  flows.begin(1, 3 * kMiB);
  other.join();
  CHECK_FALSE(flows[1].waiting_since());
}

TEST_CASE("a call larger than the whole pool runs alone, and its credit returns") {
  Flows flows(3, 12 * kMiB, 64 * kMiB);  // windows of 2 MiB
  for (int i = 0; i < 3; ++i) {
    const int rank = 1 + i % 2;
    flows.send(rank, 64 * kMiB);
    CHECK_FALSE(flows.has_room(3 - rank, 64 * kMiB));
    CHECK_FALSE(flows.has_room(3 - rank, 3 * kMiB));
    CHECK(flows.has_room(3 - rank, 2 * kMiB));  // fits in the window of that rank
    flows.begin(rank, 64 * kMiB);
  }
  CHECK(flows.budget.held() == 6 * kMiB);
}

TEST_CASE("windows take at most half of the budget, however many ranks there are") {
  for (const int ranks : {1, 2, 769, 4096}) {
    CAPTURE(ranks);
    Flows flows(ranks, 1024 * kMiB, 256 * kMiB);
    CHECK(flows.budget.window() * static_cast<uint64_t>(ranks) <= 512 * kMiB);
    CHECK(flows.budget.held() <= 512 * kMiB);
  }
}

TEST_CASE("credit that was granted to an abandoned call is returned") {
  Budget budget(2, 16 * kMiB, 16 * kMiB);  // windows of 4 MiB, a pool of 8 MiB
  std::deque<Window::Request> asked;
  Window window([&](const Window::Request& request) { asked.push_back(request); });
  const auto tell_budget = [&] {
    Budget::Grants grants = budget.ask(1, asked.front());
    asked.pop_front();
    return grants;
  };
  const uint64_t first = budget.open(rpc::process_number(1, 0)).at(0).bytes;
  window.grant(first, budget.window());
  CHECK_FALSE(window.take(9 * kMiB, base::deadline_after(1ms)).ok());
  REQUIRE(asked.size() == 1);  // the request stays until it is granted
  const Budget::Grants grants = tell_budget();
  REQUIRE(grants.size() == 1);
  CHECK(grants[0].bytes == 5 * kMiB);
  SECTION("when no call waits any more") {
    window.grant(grants[0].bytes, budget.window());
    CHECK(tell_budget().empty());
    CHECK(budget.held() == 4 * kMiB + rpc::kFirstCredit);
    CHECK(window.try_take(4 * kMiB));  // the window's own credit is kept
    CHECK_FALSE(window.try_take(1));
  }
  SECTION("before a larger request, because two partly served senders could deadlock") {
    Window::Waiter larger;
    larger.bytes = 12 * kMiB;
    window.enqueue(larger);
    CHECK(asked.empty());
    window.grant(grants[0].bytes, budget.window());
    REQUIRE(asked.size() == 1);
    CHECK(asked[0].returned == 5 * kMiB);
    const Budget::Grants more = tell_budget();
    REQUIRE(more.size() == 1);
    window.grant(more[0].bytes, budget.window());
    CHECK(window.try_serve(larger));
    window.dequeue(larger);
  }
}

TEST_CASE("small waiting calls request their credit together") {
  std::vector<Window::Request> asked;
  Window window([&](const Window::Request& request) { asked.push_back(request); });
  window.grant(8 * kMiB - rpc::kFirstCredit, 8 * kMiB);
  REQUIRE(window.try_take(8 * kMiB));
  std::list<Window::Waiter> waiters(5);
  for (Window::Waiter& waiter : waiters) {
    waiter.bytes = kMiB / 4;
    window.enqueue(waiter);
  }
  REQUIRE(asked.size() == 1);
  window.grant(kMiB / 4, 8 * kMiB);
  CHECK(window.try_serve(waiters.front()));
  window.dequeue(waiters.front());
  REQUIRE(asked.size() == 2);
  CHECK(asked[1].target - asked[1].spent == kMiB);  // the request is for only a part of the window
  for (Window::Waiter& waiter : waiters) window.dequeue(waiter);
}

TEST_CASE("a large call is not overtaken in the pool by small calls of other ranks") {
  Flows flows(3, 12 * kMiB, 12 * kMiB);  // windows of 2 MiB, a pool of 6 MiB
  flows.send(1, 2 * kMiB);
  for (int i = 0; i < 4; ++i) flows.send(1, kMiB);
  Window::Waiter large, small;
  large.bytes = 7 * kMiB;
  small.bytes = kMiB;
  flows[2].enqueue(large);
  flows[1].enqueue(small);
  CHECK_FALSE(flows[2].try_serve(large));
  CHECK_FALSE(flows[1].try_serve(small));  // although the pool has enough credit for it
  for (int i = 0; i < 3; ++i) flows.begin(1, kMiB);
  CHECK(flows[2].try_serve(large));
  flows[2].dequeue(large);
  flows[1].dequeue(small);
}

TEST_CASE("the credit of a lost rank is free for others, and its successor starts anew") {
  Flows flows(3, 12 * kMiB, 12 * kMiB);
  flows.send(1, 8 * kMiB);
  CHECK_FALSE(flows.has_room(2, 3 * kMiB));
  flows.tell(flows.budget.lose(1));
  CHECK(flows.budget.arrive(1, 64 * kMiB));  // a call that was in flight at the loss
  CHECK(flows.has_room(2, 8 * kMiB));
  const rpc::ProcessNumber next = rpc::process_number(1, 1);
  flows.budget.renew(next);
  CHECK(flows.budget.open(rpc::process_number(1, 0)).empty());
  flows.begin(1, 8 * kMiB);  // a call of the lost process
  CHECK(flows.budget.arrive(1, rpc::kFirstCredit));
  CHECK_FALSE(flows.budget.arrive(1, 1));
  CHECK(flows.budget.open(next).size() == 1);
}

TEST_CASE("a rank that claims credit that it does not have is detected") {
  Budget budget(2, 16 * kMiB, 4 * kMiB);
  CHECK(budget.arrive(1, rpc::kFirstCredit));
  CHECK_FALSE(budget.arrive(1, 1));
  for (const Window::Request& request :
       {Window::Request{rpc::kFirstCredit + 1, 0, 0}, Window::Request{0, 0, 1}}) {
    CHECK(error_of([&] { budget.ask(1, request); }).kind == ErrorKind::kProtocol);
  }
}

TEST_CASE("waits for a lost rank fail") {
  Flows flows(2, 16 * kMiB, kMiB);
  flows.send(1, kMiB);
  std::thread waiting(
      [&] { CHECK(flows[1].take(kMiB, base::kNever).error().kind == ErrorKind::kPeerLost); });
  while (!flows[1].waiting_since()) std::this_thread::yield();
  flows[1].fail(base::Error{ErrorKind::kPeerLost, "gone", 1, {}});
  waiting.join();
  CHECK(flows[1].take(1, base::kNever).error().kind == ErrorKind::kPeerLost);
}

TEST_CASE("many threads with calls of all sizes neither lose nor create credit") {
  constexpr uint64_t kTotal = 6 * kMiB;
  Flows flows(3, kTotal, 4 * kMiB);
  std::mutex mutex;
  std::deque<std::pair<int, uint64_t>> sent;
  std::atomic<bool> done{false};
  std::atomic<uint64_t> most{0};
  std::thread worker([&] {
    for (;;) {
      std::pair<int, uint64_t> next;
      {
        std::lock_guard lock(mutex);
        if (!sent.empty()) {
          next = sent.front();
          sent.pop_front();
        }
      }
      if (next.second == 0 && done) return;
      if (next.second == 0) {
        std::this_thread::yield();
        continue;
      }
      most = std::max<uint64_t>(most, flows.budget.held());
      Budget::Work work;
      flows.tell(flows.budget.begin(work, rpc::process_number(next.first, 0), next.second));
      flows.tell(flows.budget.end(work));
    }
  });
  std::vector<std::thread> callers;
  for (uint64_t caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&, caller] {
      const int rank = static_cast<int>(caller % 3);
      for (uint64_t i = 0; i < 300; ++i) {
        const uint64_t bytes = (i * 7919 + caller * 104729) % (i % 10 == 0 ? 4 * kMiB : kMiB) + 1;
        if (!flows[rank].take(bytes, base::kNever).ok()) throw std::runtime_error("no credit");
        if (i % 50 == 7) {
          flows[rank].give_back(bytes);
          continue;
        }
        if (!flows.budget.arrive(rank, bytes)) throw std::runtime_error("too much has come");
        std::lock_guard lock(mutex);
        sent.emplace_back(rank, bytes);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  done = true;
  worker.join();
  CHECK(most <= kTotal);
  CHECK(flows.budget.held() <= 3 * flows.budget.window());
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(flows[rank].take(flows.budget.window(), base::deadline_after(60s)).ok());
    CHECK_FALSE(flows[rank].try_take(1));
  }
}

namespace {

// Simulates senders and one receiver in virtual time. Each sender always has more calls; the
// receiver runs one call at a time. All messages of a sender have the same latency, so they keep
// their order.
class Simulation {
 public:
  struct Sender {
    std::unique_ptr<Window> window;
    std::list<Window::Waiter> waiting;
    uint64_t size = 0;
    uint64_t served = 0;
    uint64_t latency = 0;
    int idle = 0;
    bool is_hasty = false;  // abandons its last waiting call to begin another
  };

  Simulation(int ranks, uint64_t total, uint64_t per_peer, uint64_t seed)
      : total_(total), budget_(ranks, total, per_peer), senders_(static_cast<size_t>(ranks)) {
    for (int rank = 0; rank < ranks; ++rank) {
      Sender& sender = senders_[static_cast<size_t>(rank)];
      const uint64_t random = (seed += 0x9E3779B97F4A7C15) * 0xD1342543DE82EF95 >> 32;
      sender.size = rpc::kCallCost + (uint64_t{120} << 10 << random % 5);  // 120 KiB to 2 MiB
      sender.latency = 1 + random / 8 % 50;
      sender.idle = 1 + static_cast<int>(random / 512 % 16);
      sender.idle += static_cast<int>(4 * budget_.window() / sender.size);
      sender.is_hasty = random / 16384 % 16 == 0;
      sender.window = std::make_unique<Window>([this, rank](const Window::Request& request) {
        post(at(rank).latency, [this, rank, request] { tell(budget_.ask(rank, request)); });
      });
      post(sender.latency, [this, rank] { tell(budget_.open(rpc::process_number(rank, 0))); });
      post(0, [this, rank] { call(rank); });
    }
  }

  void run_until_served(uint64_t bytes) {
    while (served_ < bytes) step();
  }
  void drain() {
    is_over_ = true;
    while (!events_.empty()) step();
  }

  std::vector<Sender>& senders() { return senders_; }
  Budget& budget() { return budget_; }
  uint64_t most() const { return most_; }
  uint64_t calls() const { return calls_; }

 private:
  struct Event {
    uint64_t time;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return std::pair(time, number) > std::pair(other.time, other.number);
    }
  };
  Sender& at(int rank) { return senders_[static_cast<size_t>(rank)]; }
  void post(uint64_t delay, std::function<void()> what) {
    events_.push({now_ + delay, next_++, std::move(what)});
  }
  void step() {
    if (events_.empty()) FAIL("nothing goes on");
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    event.what();
    most_ = std::max(most_, budget_.held());
  }
  void tell(const Budget::Grants& grants) {
    for (const Budget::Grant& grant : grants) {
      const int rank = rpc::rank_of(grant.to);
      post(at(rank).latency, [this, rank, bytes = grant.bytes] {
        at(rank).window->grant(bytes, budget_.window());
        serve(rank);
      });
    }
  }
  void serve(int rank) {
    Sender& sender = at(rank);
    while (!sender.waiting.empty() && sender.window->try_serve(sender.waiting.front())) {
      sender.window->dequeue(sender.waiting.front());
      sender.waiting.pop_front();
      send(rank);
    }
  }
  void call(int rank) {
    Sender& sender = at(rank);
    if (sender.is_hasty && !sender.waiting.empty()) {
      sender.window->dequeue(sender.waiting.back());
      sender.waiting.pop_back();
      ++sender.idle;
      serve(rank);
    }
    for (; sender.idle > 0 && !is_over_; --sender.idle) {
      if (sender.window->try_take(sender.size)) {
        send(rank);
      } else {
        sender.waiting.emplace_back().bytes = sender.size;
        sender.window->enqueue(sender.waiting.back());
      }
    }
  }
  void send(int rank) {
    post(at(rank).latency, [this, rank] {
      if (!budget_.arrive(rank, at(rank).size)) FAIL("too much has come");
      queue_.push_back(rank);
      if (queue_.size() == 1) begin();
    });
  }
  void begin() {
    const int rank = queue_.front();
    tell(budget_.begin(work_, rpc::process_number(rank, 0), at(rank).size));
    post(1 + at(rank).size / (16 << 10), [this, rank] {
      tell(budget_.end(work_));
      at(rank).served += at(rank).size;
      served_ += at(rank).size;
      ++calls_;
      post(at(rank).latency, [this, rank] {
        ++at(rank).idle;
        call(rank);
      });
      queue_.pop_front();
      if (!queue_.empty()) begin();
    });
  }

  const uint64_t total_;
  Budget budget_;
  std::vector<Sender> senders_;
  std::priority_queue<Event> events_;
  std::deque<int> queue_;
  Budget::Work work_;
  uint64_t now_ = 0, next_ = 0, served_ = 0, most_ = 0, calls_ = 0;
  bool is_over_ = false;
};

}  // namespace

TEST_CASE("each of 4,096 ranks that always have more to send gets its share of the bytes") {
  constexpr int kRanks = 4096;
  constexpr uint64_t kShare = 6 * kMiB;
  Simulation simulation(kRanks, 1024 * kMiB, 256 * kMiB, 7);
  simulation.run_until_served(kRanks * kShare);
  uint64_t least = kShare;
  for (const auto& sender : simulation.senders()) least = std::min(least, sender.served);
  CAPTURE(least, kShare, simulation.calls());
  CHECK(least >= kShare / 2);
  simulation.drain();
  CHECK(std::ranges::all_of(simulation.senders(), [](auto& each) { return each.waiting.empty(); }));
  CHECK(simulation.most() <= 1024 * kMiB);
  CHECK(simulation.most() >= 768 * kMiB);
  CHECK(simulation.budget().held() <= 512 * kMiB);
}

TEST_CASE("waiting calls stay within a rank's budget, and all of them run") {
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
  CHECK(sent == 3);  // 2 MiB each, plus a small overhead
  // A call in the other direction still works, because its reply needs no credit.
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
  CHECK(sent < 20);  // calls that have begun hold up to 16 MiB, and a window limits the others
  // A call in the other direction still works, because its reply needs no credit.
  CHECK(cluster[1].rpc_sync<&add>(0, 1, 2) == 3);
  cluster[1].shared<Kept>()->answer_all();
  caller.join();
  for (const auto& answer : answers) CHECK(answer.wait() == 1);
  cluster.shutdown();
}

TEST_CASE("small calls have credit of their own beside large calls, and it is bounded") {
  const int to = GENERATE(0, 1);
  CAPTURE(to);
  rpc::AgentOptions options;
  options.worker_threads = 1;
  options.peer_budget = 8 * kMiB;
  Cluster cluster(2, expose_all, options);
  g_gate = false;
  auto held_up = cluster[0].rpc_async<&wait_at_gate>(to);
  wait_for_call_at_gate();
  const auto waiting_for_room = [&] {
    return std::ranges::count_if(cluster[0].waits(), [](const rpc::Wait& wait) {
      return wait.what.find("room on rank") != std::string::npos;
    });
  };
  std::atomic<int> right{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {  // the second call waits, because the first has all credit
    callers.emplace_back([&] {
      const at::Tensor tensor = mebibytes(7);
      right += cluster[0].rpc_sync<&size_of>(rpc::To(to).without_deadline(), tensor) == 7 << 18;
    });
  }
  while (waiting_for_room() < 1) std::this_thread::sleep_for(1ms);
  std::atomic<int> sent{0};
  constexpr int kCalls = 3000;
  callers.emplace_back([&] {
    std::vector<base::Future<int64_t>> sums;
    for (int i = 0; i < kCalls; ++i) {
      sums.push_back(cluster[0].rpc_async<&add>(rpc::To(to).without_deadline(), i, 1));
      ++sent;
    }
    for (int i = 0; i < kCalls; ++i) right += sums[static_cast<size_t>(i)].wait() == i + 1;
  });
  while (waiting_for_room() < 2) std::this_thread::sleep_for(1ms);
  CHECK(sent >= 256);
  CHECK(sent <= 1024);  // kSmallCallsWindow / kCallCost
  g_gate = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(right == kCalls + 2);
  held_up.wait();
  cluster.shutdown();
}

TEST_CASE("small calls begin although many of them are unanswered and large calls wait") {
  rpc::AgentOptions options;
  options.peer_budget = options.total_budget = 8 * kMiB;
  Cluster cluster(2, expose_all, options);
  const rpc::To to = rpc::To(1).without_deadline();
  std::atomic<int64_t> large{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {  // one is kept, one keeps its credit, and one waits for credit
    callers.emplace_back([&] { large += cluster[0].rpc_sync<&keep>(to, mebibytes(7)); });
  }
  while (!waits_for_room(cluster[0])) std::this_thread::sleep_for(1ms);
  std::vector<base::Future<int64_t>> kept;
  for (int i = 0; i < 3000; ++i) kept.push_back(cluster[0].rpc_async<&keep>(to, at::ones({1})));
  cluster[1].shared<Kept>()->answer_all();
  for (const auto& each : kept) CHECK(each.wait() == 1);
  for (std::thread& caller : callers) caller.join();
  CHECK(large == 3);
  cluster.shutdown();
}

TEST_CASE("a call without room before its deadline is overloaded") {
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

TEST_CASE("messages for a channel that is not open are bounded") {
  rpc::AgentOptions options;
  options.total_budget = 4 * kMiB;
  const std::vector<uint8_t> bytes(kMiB);  // the loops may send it until the cluster ends
  Cluster cluster(2, expose_all, options);
  g_gate = false;
  auto held_up = cluster[1].rpc_async<&wait_at_gate>(0);
  wait_for_call_at_gate();
  const std::span<const uint8_t> piece(bytes);
  for (uint16_t i = 0; i < 8; ++i) {
    auto& channel = cluster[0].open_channel(static_cast<uint16_t>(20 + i % 3));
    static_cast<void>(error_of([&] { channel.send(1, {}, {&piece, 1}, {}); }));  // may fail
  }
  const base::Error error = error_of([&] { held_up.wait(); });
  CHECK(error.kind == ErrorKind::kOverloaded);
  CHECK(error.rank == 1);
  CHECK(contains(error.message, "which nobody has opened on rank 1 yet"));
  g_gate = true;
}

TEST_CASE("early messages no longer count once their channel is open") {
  rpc::AgentOptions options;
  options.total_budget = 4 * kMiB;
  const std::vector<uint8_t> bytes(kMiB);  // the loops may send it until the cluster ends
  Cluster cluster(2, expose_all, options);
  const std::span<const uint8_t> piece(bytes);
  for (uint16_t round = 0; round < 4; ++round) {
    const auto number = static_cast<uint16_t>(20 + round);
    for (int i = 0; i < 3; ++i) cluster[0].open_channel(number).send(1, {}, {&piece, 1}, {});
    CHECK(cluster[0].rpc_sync<&add>(1, 1, 2) == 3);  // ensures that the messages have arrived
    std::atomic<int> heard{0};
    cluster[1].open_channel(number).set_handler({[&](rpc::ChannelMessage) { ++heard; }, {}});
    CHECK(heard == 3);
    cluster[1].open_channel(number).set_handler({});
  }
  cluster.shutdown();
}

TEST_CASE("calls that have begun keep their credit when too many hold too much") {
  Flows flows(5, 10 * kMiB, 10 * kMiB);  // windows of 1 MiB, a pool of 5 MiB
  const auto has_back = [&, held = flows.budget.held()](uint64_t sent) {
    return flows.budget.held() + sent <= held;
  };
  Budget::Work a, b, c, d, none;
  const auto begin = [&](Budget::Work& work, int rank, uint64_t bytes) {
    flows.send(rank, bytes);
    flows.tell(flows.budget.begin(work, rpc::process_number(rank, 0), bytes));
  };
  begin(a, 1, 20 * kMiB);  // larger than the whole pool, but the only call
  CHECK(has_back(0));
  begin(b, 2, 3 * kMiB);
  begin(c, 3, 3 * kMiB);
  flows.tell(flows.budget.begin(none, rpc::process_number(3, 0), 0));
  CHECK(flows.budget.held() == 9 * kMiB);
  CHECK_FALSE(flows.has_room(2, 3 * kMiB));
  flows.tell(flows.budget.end(c));  // call c had kept its credit
  CHECK(flows.budget.held() == 8 * kMiB);
  flows.tell(flows.budget.end(none));
  flows.tell(flows.budget.end(a));
  CHECK(has_back(0));
  CHECK(flows.has_room(2, 3 * kMiB));
  flows.tell(flows.budget.end(b));
  begin(d, 4, 6 * kMiB);
  CHECK(has_back(0));
  flows.tell(flows.budget.end(d));
}

TEST_CASE("a waiting call is found by its rank and ID") {
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
  CHECK(queue.take(1, 8));  // takes the last of the two calls with this ID
  queue.drop_all_of(3);
  std::vector<std::pair<int, uint64_t>> left;
  const auto never = [](int) { return false; };
  while (auto call = queue.pop(never)) left.emplace_back(call->from, call->id);
  CHECK(left == std::vector<std::pair<int, uint64_t>>{{1, 7}, {1, 8}, {2, 9}, {1, 9}});
}

TEST_CASE("calls of a blocked rank are parked in their order and can be found") {
  rpc::CallQueue queue;
  std::vector<int> blocked{1};
  const auto is_blocked = [&](int rank) { return std::ranges::count(blocked, rank) > 0; };
  const auto push = [&](int from, uint64_t id) {
    rpc::QueuedCall call;
    call.from = from;
    call.id = id;
    queue.push(std::move(call));
  };
  for (const uint64_t id : {1, 2, 3, 4}) push(1, id);
  push(2, 5);
  CHECK(queue.pop(is_blocked)->id == 5);
  CHECK(queue.take(1, 2)->id == 2);  // found by its rank and ID
  CHECK_FALSE(queue.pop_parked(1, is_blocked).first);
  blocked.clear();
  push(1, 6);
  push(3, 7);
  CHECK(queue.pop(is_blocked)->id == 7);  // call 6 waits behind rank 1's parked calls
  for (const uint64_t id : {1, 3, 4, 6}) {
    const auto [call, has_more] = queue.pop_parked(1, is_blocked);
    CHECK(call->id == id);
    CHECK(has_more == (id != 6));
  }
  blocked = {4};
  push(4, 8);
  CHECK_FALSE(queue.pop(is_blocked));
  queue.drop_all_of(4);
  CHECK_FALSE(queue.take(4, 8));
  blocked.clear();
  CHECK_FALSE(queue.pop_parked(4, is_blocked).first);
}

TEST_CASE("a call that is cancelled before it is sent is not sent") {
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

TEST_CASE("a call whose deadline passes before it is sent returns its credit") {
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

TEST_CASE("a call larger than a rank's whole budget gets all the credit that it needs") {
  rpc::AgentOptions options;
  options.peer_budget = 2 * kMiB;
  options.total_budget = 4 * kMiB;
  Cluster cluster(2, expose_all, options);
  for (int i = 0; i < 3; ++i) CHECK(cluster[0].rpc_sync<&size_of>(1, mebibytes(16)) == 16 << 18);
  cluster.shutdown();
}

TEST_CASE("a call that no frame can hold is refused and takes no credit") {
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

TEST_CASE("two ranks that flood each other until no room is left both continue") {
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
  cluster.shutdown();  // succeeds only if no rank is lost
}

TEST_CASE("two ranks that flood each other with calls larger than the whole budget both continue") {
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
          // The argument and the result are both larger than the whole budget of a peer.
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

TEST_CASE("a cancelled call does not run, and its credit is free at once") {
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
    // `second` gets the credit of `first` although the only worker is still at the gate.
    auto second = cluster[0].rpc_async<&size_of>(rpc::To(to).without_deadline(), mebibytes(7));
    g_gate = true;
    CHECK(second.wait() == 7 << 18);
    held_up.wait();
    held_up.cancel();  // no effect, because the call has finished
    cluster.shutdown();
    CHECK(cluster[0].live_rrefs() == 0);
  }
}

namespace {

// A real rank 0, and a rank 1 that has joined it and whose messages the test sends.
struct ByHand {
  explicit ByHand(rpc::AgentOptions options) : zero(options), control(zero.agent().port()) {
    control.join(1, {"127.0.0.1", net::local_name(listener.get()).port, {}, {}, 0});
    const auto directory = control.receive();
    REQUIRE(directory);
    control.send(wire::FrameKind::kPrepared, no_devices());
    REQUIRE(zero.joined());
    calls.emplace(zero.agent().port());
    secret = wire::decode_directory(directory->second).secret;
    CHECK(calls->introduce(1, wire::HelloPurpose::kPeer, secret));
  }
  void call_give(uint64_t id, int64_t mib) {
    wire::Bytes meta;
    wire::Writer out(meta);
    out.put(uint32_t{0});  // no RRefs
    out.put(std::string_view("give"));
    out.put(uint32_t{0});  // no deadline
    out.put(uint8_t{0});
    out.put(mib);
    calls->send(wire::FrameKind::kCall, meta, id);
  }
  // Accepts rank 0's bulk connection.
  void accept_bulk() {
    pollfd entry{listener.get(), POLLIN, 0};
    while (::poll(&entry, 1, -1) < 0) {
    }
    bulk.emplace(net::Fd(::accept(listener.get(), nullptr, nullptr)));
    CHECK(bulk->be_met(1, secret).purpose == wire::HelloPurpose::kBulk);
  }
  // Returns the next reply's header. Its payload has been received, too.
  wire::FrameHeader receive_reply() {
    for (;;) {
      const auto frame = calls->receive();
      REQUIRE(frame);
      const wire::FrameHeader& header = frame->first;
      if (header.kind != wire::FrameKind::kReply) continue;
      wire::Bytes payload(header.in_bulk ? header.payload_bytes : 0);
      CHECK(bulk->receive_bytes(payload.data(), payload.size()));
      return header;
    }
  }

  net::Fd listener = std::move(net::listen_tcp("127.0.0.1", 0).value());
  Joining zero;
  RawRank control;
  std::optional<RawRank> calls, bulk;
  std::string secret;
};

std::atomic<int> g_gives{0};

at::Tensor give(int64_t mib) {
  ++g_gives;
  return mebibytes(mib);
}

}  // namespace

TEST_CASE("a rank that exceeds its credit is lost before memory is allocated") {
  rpc::AgentOptions options = options_for(0, 2);
  options.worker_threads = 1;
  options.peer_budget = kMiB;
  ByHand job(options);
  auto call = job.zero.agent().rpc_async<&add>(rpc::To(1).without_deadline(), 1, 2);
  wire::FrameHeader header;
  // Rank 1 sends the header of a large frame and no more of it.
  SECTION("a large call") { header.payload_bytes = uint64_t{60} << 30; }
  SECTION("a large call that claims to need no credit") {
    header.channel = wire::kWithoutCredit;
    header.payload_bytes = uint64_t{60} << 30;
  }
  SECTION("a large call that claims to be small") {
    header.channel = wire::kWithSmallCredit;
    header.payload_bytes = kMiB / 8;
  }
  SECTION("credit for small calls that it does not have") {
    header.kind = wire::FrameKind::kSmallCreditRequest;
    header.autograd_id = 64 * kMiB;
  }
  SECTION("a transfer to a device") {
    header.kind = wire::FrameKind::kChunk;
    header.channel = static_cast<uint16_t>(wire::DeviceType::kCuda);
    header.payload_bytes = kMiB;
    header.autograd_id = uint64_t{60} << 30;
  }
  SECTION("credit that it does not have") {
    header.kind = wire::FrameKind::kCreditRequest;
    header.autograd_id = 64 * kMiB;
  }
  int many = 0;  // calls that are sent with their bodies
  uint32_t bytes = kMiB / 2;
  SECTION("one call after the other") { many = 4; }
  SECTION("one small call after the other") {
    many = 40;
    bytes = 60 << 10;
    header.channel = wire::kWithSmallCredit;
  }
  job.zero.agent().expose<&wait_at_gate>("wait_at_gate");
  g_gate = false;
  auto held_up = job.zero.agent().rpc_async<&wait_at_gate>(0);
  wait_for_call_at_gate();
  if (many > 0) header.meta_bytes = bytes;
  uint8_t head[wire::kHeaderBytes];
  wire::encode_header(header, head);
  for (int i = 0; i < std::max(many, 1); ++i) {
    job.calls->send_bytes(head, sizeof head);
    if (many > 0) job.calls->send_bytes(wire::Bytes(bytes).data(), bytes);
  }
  const base::Error e = error_of([&] { call.wait(); });
  CHECK(e.kind == ErrorKind::kProtocol);
  CHECK(e.rank == 1);
  CHECK(contains(e.message, "credit"));
  g_gate = true;
  held_up.wait();
}

TEST_CASE("calls of a rank that does not read its replies wait, and those of others do not") {
  constexpr int kCalls = 8;
  rpc::AgentOptions options = options_for(0, 2);
  options.worker_threads = 1;
  options.total_budget = kMiB;
  ByHand job(options);
  Agent& agent = job.zero.agent();
  agent.expose<&give>("give");
  g_gives = 0;
  for (uint64_t id = 1; id <= kCalls; ++id) job.call_give(id, 8);
  while (g_gives == 0) std::this_thread::sleep_for(1ms);
  job.accept_bulk();
  // Rank 0's only worker runs these calls after all calls of give() that it may run.
  for (int i = 0; i < kCalls; ++i) CHECK(agent.rpc_sync<&add>(0, 1, 2) == 3);
  CHECK(g_gives <= 3);  // the kernel buffers few replies, so later calls wait
  for (uint64_t id = 1; id <= kCalls; ++id) {
    const wire::FrameHeader reply = job.receive_reply();
    CHECK(reply.call_id == id);
    CHECK(reply.payload_bytes >= 8 * kMiB);
  }
  CHECK(g_gives == kCalls);
}

TEST_CASE("calls begin beside one large reply that is not read, but not beside two") {
  rpc::AgentOptions options = options_for(0, 2);
  options.worker_threads = 1;
  options.total_budget = kMiB;
  ByHand job(options);
  Agent& agent = job.zero.agent();
  agent.expose<&give>("give");
  g_gives = 0;
  const auto run_all = [&] {  // rank 0's only worker runs this call after those that may begin
    for (int i = 0; i < 4; ++i) CHECK(agent.rpc_sync<&add>(0, 1, 2) == 3);
  };
  job.call_give(1, 64);  // more than the kernel buffers
  for (uint64_t id = 2; id <= 4; ++id) job.call_give(id, 0);
  while (g_gives < 4) std::this_thread::sleep_for(1ms);
  job.accept_bulk();
  job.call_give(5, 2);
  while (g_gives < 5) std::this_thread::sleep_for(1ms);
  job.call_give(6, 0);
  run_all();
  CHECK(g_gives == 5);
  for (int replies = 0; replies < 6; ++replies) job.receive_reply();
  CHECK(g_gives == 6);
}

namespace {

// Counters of clients that call rank 0 repeatedly until it has run 90 calls.
struct Race {
  std::atomic<int> calling[4] = {};
  std::atomic<int> done[4] = {};
  std::atomic<int> all{0};
  std::atomic<bool> over{false};
};
Race* g_race = nullptr;

// Waits until every client has a call in flight, and then counts the call of its caller.
void take_part(rpc::CallContext& call, at::Tensor) {
  Race& race = *g_race;
  while (!race.over && (!race.calling[1] || !race.calling[2] || !race.calling[3])) {
    std::this_thread::sleep_for(100us);
  }
  std::this_thread::sleep_for(1ms);
  if (race.over) return;
  ++race.done[call.caller.rank];
  if (++race.all == 90) race.over = true;
}

}  // namespace

TEST_CASE("a client with many threads does not reduce the share of the others") {
  const auto [greedy, others, kib] =
      GENERATE(std::tuple(8, 1, 448), std::tuple(4, 4, 448), std::tuple(4, 1, 400));
  CAPTURE(greedy, others, kib);
  rpc::AgentOptions options;
  options.total_budget = kMiB;
  options.peer_budget = kMiB / 4;
  Race race;
  g_race = &race;
  Cluster cluster(
      4, [](Agent& agent) { agent.expose<&take_part>("take_part"); }, options);
  const at::Tensor tensor = at::ones({kib << 8});
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int client = 1; client < 4; ++client) {
    for (int thread = 0; thread < (client == 1 ? greedy : others); ++thread) {
      threads.emplace_back([&, client] {
        while (!race.over) {
          ++race.calling[client];
          try {
            cluster[client].rpc_sync<&take_part>(0, tensor);
          } catch (const base::Exception&) {
            ++failed;
          }
          --race.calling[client];
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  CAPTURE(race.done[1].load(), race.done[2].load(), race.done[3].load());
  for (int client = 1; client < 4; ++client) CHECK(race.done[client] >= 15);
  CHECK(failed == 0);
  cluster.shutdown();
}
