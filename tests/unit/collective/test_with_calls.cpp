// Tests groups of ranks together with calls: in either order, of some ranks, from several threads.
#include <algorithm>
#include <atomic>
#include <thread>

#include <ATen/ATen.h>

#include "distrain/collective/backend.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "unit/rpc/call_forms.h"

namespace distrain::testing::with_calls {
namespace {

using BackendPtr = c10::intrusive_ptr<collective::Backend>;

/// Returns a group of `ranks`, which has its own channel `number`.
BackendPtr group_of(rpc::Agent& agent, uint16_t number, const std::vector<int>& ranks) {
  return c10::make_intrusive<collective::Backend>(
      agent.open_channel(number), agent.executor(), collective::Group{number, ranks},
      collective::BackendSettings{.timeout = std::chrono::minutes(2)});
}

struct Counter {
  std::atomic<int> count{0};
};
void reset(rpc::CallContext& call) { call.agent.shared<Counter>()->count = 0; }
void increment(rpc::CallContext& call) { ++call.agent.shared<Counter>()->count; }
at::Tensor slow_sum(const at::Tensor& x, const at::Tensor& y) {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return x + y;
}

void expose(rpc::Agent& agent) {
  expose_forms(agent);
  agent.expose<&reset>("reset");
  agent.expose<&increment>("increment");
  agent.expose<&slow_sum>("slow_sum");
}

// Enters two barriers of `ranks`; between them, each rank counts once on the first rank.
void count_between_barriers(rpc::Agent& agent, const BackendPtr& group, std::vector<int> ranks,
                            bool is_alone) {
  const int first = *std::ranges::min_element(ranks);
  if (is_alone) agent.rpc_sync<&reset>(first);
  group->enter_barrier().wait();
  agent.rpc_sync<&increment>(first);
  group->enter_barrier().wait();
  if (is_alone && agent.rank() == first) {
    expect(agent.shared<Counter>()->count == static_cast<int>(ranks.size()), "a wrong count");
  }
}

TEST_CASE("barriers of all ranks, of halves and of some ranks order calls") {
  Cluster cluster(4, expose);
  cluster.on_all([](rpc::Agent& agent) {
    const bool is_odd = agent.rank() % 2 == 1;
    const std::vector<int> half = is_odd ? std::vector{1, 3} : std::vector{0, 2};
    const std::vector<int> some = is_odd ? half : std::vector{agent.rank()};
    const BackendPtr all = group_of(agent, 20, {0, 1, 2, 3});
    count_between_barriers(agent, all, {0, 1, 2, 3}, true);
    all->enter_barrier().wait();  // rank 0 has read its count
    count_between_barriers(agent, group_of(agent, is_odd ? 21 : 22, half), half, true);
    all->enter_barrier().wait();
    const int number = is_odd ? 23 : 24 + agent.rank();
    count_between_barriers(agent, group_of(agent, static_cast<uint16_t>(number), some), some, true);
    all->enter_barrier().wait();
  });
  cluster.shutdown();
}

TEST_CASE("several threads of each rank may enter barriers of one group") {
  Cluster cluster(4, expose);
  cluster.on_all([](rpc::Agent& agent) {
    const std::vector<int> all = {0, 1, 2, 3};
    const BackendPtr group = group_of(agent, 20, all);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] { count_between_barriers(agent, group, all, false); });
    }
    for (std::thread& thread : threads) thread.join();
  });
  cluster.shutdown();
}

TEST_CASE("calls and a group work in either order, and during a call") {
  Cluster cluster(3, expose);
  const bool is_group_first = GENERATE(false, true);
  cluster.on_all([&](rpc::Agent& agent) {
    const int next = (agent.rank() + 1) % 3;
    const at::Tensor x = at::ones({2, 2});
    const auto call = [&] {
      expect(at::equal(agent.rpc_sync<kAddScalar>(next, x, 1, 1), x + 1), "a call");
    };
    const auto slow = agent.rpc_async<&slow_sum>(next, x, x);
    if (!is_group_first) call();
    const BackendPtr group = group_of(agent, 20, {0, 1, 2});
    if (is_group_first) call();
    group->enter_barrier().wait();
    const at::Tensor sum = at::ones({3});
    group->allreduce(sum).wait();
    expect(at::equal(sum, at::full({3}, 3.F)), "a sum");
    expect(at::equal(slow.wait(), x * 2), "a call during the barrier");
  });
  cluster.shutdown();
}

TEST_CASE("ranks in barriers, and then in shutdown(), answer the calls of a rank that works") {
  Cluster cluster(4, expose);
  const bool sparse = GENERATE(false, true);
  cluster.on_all([&](rpc::Agent& agent) {
    const BackendPtr group = group_of(agent, 20, {0, 1, 2, 3});
    if (agent.rank() == 0) {
      for (const int to : {1, 2}) {
        std::vector<base::Future<int64_t>> calls;
        for (int i = 0; i < 30; ++i) {
          calls.push_back(
              agent.rpc_async<&heavy>(to, sparse ? sparse_tensor() : at::ones({100, 100})));
        }
        base::wait_all(calls);
        for (const auto& call : calls) expect(call.wait() == 0, "a wrong answer");
      }
    }
    group->enter_barrier().wait();
    group->enter_barrier().wait();
    agent.shutdown();
  });
}

TEST_CASE("the numbers of all ranks are gathered, or a deadline names the missing rank") {
  Cluster cluster(3, expose);
  cluster.on_all([](rpc::Agent& agent) {
    const BackendPtr group = group_of(agent, 20, {0, 1, 2});
    std::vector<at::Tensor> numbers;
    for (int i = 0; i < 3; ++i) numbers.push_back(at::zeros({1}, at::kLong));
    group->allgather(at::full({1}, agent.rank(), at::kLong), numbers).wait();
    for (int i = 0; i < 3; ++i) {
      expect(numbers[static_cast<size_t>(i)].item<int64_t>() == agent.worker(i).rank, "a number");
    }
    group->enter_barrier().wait();
    const BackendPtr incomplete = group_of(agent, 21, {0, 1, 2});
    collective::Pending pending;
    if (agent.rank() != 2) {
      pending = incomplete->allgather(at::full({1}, agent.rank(), at::kLong), numbers);
    }
    // The peer has the message of this rank before the call.
    if (agent.rank() != 2) agent.rpc_sync<&reset>(1 - agent.rank());
    group->enter_barrier().wait();
    if (agent.rank() != 2) {
      pending.expire();
      const base::Error error = error_of([&] { pending.wait(); });
      expect(error.kind == base::ErrorKind::kDeadline && error.rank == 2, "no deadline");
    }
    group->enter_barrier().wait();
  });
  cluster.shutdown();
}

}  // namespace
}  // namespace distrain::testing::with_calls
