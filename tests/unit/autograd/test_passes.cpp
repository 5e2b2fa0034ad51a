// Tests how contexts and the passes over a context begin and end.
#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/Functions.h>

#include "../rpc/gate.h"
#include "../src/autograd/runtime.h"
#include "distrain/autograd/context.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using autograd::ContextState;
using base::ErrorKind;
using rpc::Agent;
using testing::Cluster;
using testing::error_of;

namespace {

at::Tensor leaf() { return at::ones({2}, at::kDouble).requires_grad_(); }
at::Tensor times_two(at::Tensor x) { return x * 2; }
at::Tensor broken(at::Tensor) { throw std::runtime_error("broken"); }

void set_up(Agent& agent) {
  autograd::install(agent);
  agent.expose<&times_two>("times_two");
  agent.expose<&broken>("broken");
}

const base::Error kBroken{ErrorKind::kBadData, "broken", 0, {}};

/// The state of a context whose next pass has a guard. `told` counts the guard's failures.
struct Guarded {
  explicit Guarded(Agent& agent_in) : agent(agent_in), state(std::make_shared<ContextState>(1)) {
    guard();
  }
  void guard() {
    autograd::PassGuard guard;
    guard.on_failure = [told = told](const base::Error&) { ++*told; };
    state->set_guard(std::move(guard));
  }
  std::shared_ptr<autograd::Pass> begin(uint64_t pass) {
    return state->pass_or(pass, [&] {
      auto made = std::make_shared<autograd::Pass>(agent, pass, autograd::PassOptions{});
      made->prepare(state, {});
      return made;
    });
  }

  Agent& agent;
  std::shared_ptr<ContextState> state;
  std::shared_ptr<int> told = std::make_shared<int>(0);
};

}  // namespace

TEST_CASE("contexts may end in another order than they began, and on another thread") {
  Cluster cluster(2, set_up);
  Agent& agent = cluster[0];
  auto first = std::make_unique<autograd::Context>(agent);
  auto second = std::make_unique<autograd::Context>(agent);
  auto third = std::make_unique<autograd::Context>(agent);
  const at::Tensor a = leaf();
  first.reset();
  CHECK(rpc::current_context() == third->id());
  third.reset();
  CHECK(rpc::current_context() == second->id());
  // Calls belong to `second`, the only context that is still alive.
  autograd::backward(*second, {agent.rpc_sync<&times_two>(1, a).sum()});
  CHECK(at::equal(second->gradient(a), at::full({2}, 2.0, at::kDouble)));
  std::thread([context = std::move(second)]() mutable {
    context.reset();
    CHECK(rpc::current_context() == 0);
  }).join();
  const autograd::Context last(agent);
  CHECK(rpc::current_context() == last.id());
  {
    const autograd::Context within(agent);
    CHECK(rpc::current_context() == within.id());
  }
  CHECK(rpc::current_context() == last.id());
}

TEST_CASE("a context that another thread ends is no longer the current context of its creator") {
  Cluster cluster(2, set_up);
  Agent& agent = cluster[0];
  const auto end_elsewhere = [](std::unique_ptr<autograd::Context>& context) {
    std::thread([&] { context.reset(); }).join();
  };
  auto outer = std::make_unique<autograd::Context>(agent);
  auto inner = std::make_unique<autograd::Context>(agent);
  end_elsewhere(inner);
  CHECK(rpc::current_context() == outer->id());
  CHECK(autograd::ContextRef::current()->id() == outer->id());
  end_elsewhere(outer);
  CHECK(rpc::current_context() == 0);
  CHECK_FALSE(autograd::ContextRef::current());
  CHECK(at::equal(agent.rpc_sync<&times_two>(1, leaf()), at::full({2}, 2.0, at::kDouble)));
}

TEST_CASE("late messages for an ended context do not create it again") {
  constexpr int kContexts = 5000;
  Cluster cluster(2, set_up);
  const auto here = autograd::Runtime::of(cluster[0]), there = autograd::Runtime::of(cluster[1]);
  const auto is_refused = [&](uint64_t id) {
    return error_of([&] { there->find_or_create(id); }).kind == ErrorKind::kInvalid;
  };
  autograd::Context longest(cluster[0], autograd::Context::Scope::kExplicit);
  std::vector<uint64_t> ended;
  for (int i = 0; i < kContexts; ++i) {
    const auto next = here->create();
    // When a context ends, its participants are notified at once. The next notice to rank 1 also
    // covers the contexts in which rank 1 did not participate.
    if (i % 3 != 0) next->add_participant(1);
    ended.push_back(next->id());
    here->release(next->id());
  }
  // Releases contexts in an order that differs from the order of their creation.
  std::vector<std::shared_ptr<ContextState>> some;
  for (int i = 0; i < 6; ++i) some.push_back(here->create());
  for (const int i : {4, 1, 3, 0, 5}) {
    some[static_cast<size_t>(i)]->add_participant(1);
    ended.push_back(some[static_cast<size_t>(i)]->id());
    here->release(ended.back());
  }
  CHECK(cluster[0].rpc_sync<&times_two>(1, leaf()).defined());  // arrives after all notices
  CHECK(std::ranges::all_of(ended, is_refused));
  CHECK_FALSE(is_refused(longest.id()));
  CHECK_FALSE(is_refused(some[2]->id()));
  here->release(some[2]->id());
}

TEST_CASE("when the last context has ended no context is current, in any order of the ends") {
  Cluster cluster(1, set_up);
  auto first = std::make_unique<autograd::Context>(cluster[0]);
  auto second = std::make_unique<autograd::Context>(cluster[0]);
  first.reset();
  second.reset();
  CHECK(rpc::current_context() == 0);
}

TEST_CASE("a second concurrent backward of one context is refused and does not disturb the first") {
  Cluster cluster(2, set_up);
  Agent& agent = cluster[0];
  autograd::Context context(agent, autograd::Context::Scope::kExplicit);
  const at::Tensor a = leaf(), b = leaf();
  base::Promise<void> reached, go_on;
  context.on_pass_end([&] {
    reached.set();
    go_on.future().wait();
  });
  const auto loss_of = [&](const at::Tensor& x) {
    const rpc::ContextScope scope(agent, context.id());
    return agent.rpc_sync<&times_two>(1, x).sum();
  };
  const at::Tensor loss = loss_of(a), other = (b * 3).sum();
  auto running = std::async(std::launch::async, [&] {
    return error_of([&] { autograd::backward(context, {loss}, {.retain_graph = true}); });
  });
  reached.future().wait();
  for (int i = 0; i < 2; ++i) {
    const base::Error error = error_of([&] {
      if (i == 0) autograd::backward(context, {other});
      if (i == 1) autograd::backward_async(context, {other}).wait();
    });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.message.find("another backward pass over this context is under way") !=
          std::string::npos);
  }
  go_on.set();
  CHECK(running.get().message == "(no error)");
  CHECK(at::equal(context.gradient(a), at::full({2}, 2.0, at::kDouble)));
  CHECK_FALSE(context.gradient(b).defined());
  autograd::backward(context, {loss, other});  // sequential passes are allowed
  CHECK(at::equal(context.gradient(a), at::full({2}, 4.0, at::kDouble)));
  CHECK(at::equal(context.gradient(b), at::full({2}, 3.0, at::kDouble)));
}

TEST_CASE("late messages of a failed pass do not end the next pass") {
  Cluster cluster(1, set_up);
  Guarded context(cluster[0]);
  SECTION("a pass that never began here") {
    const auto next = context.begin(2);
    CHECK_FALSE(context.state->fail_pass(1, kBroken));
    CHECK(*context.told == 0);
    CHECK(context.begin(2) == next);
  }
  SECTION("a pass that began here and fails here again") {
    const auto failed = context.begin(1);
    CHECK(context.state->fail_pass(1, kBroken));
    CHECK(*context.told == 1);
    context.guard();
    const auto next = context.begin(2);
    CHECK_FALSE(context.state->fail_pass(1, kBroken));
    failed->fail(kBroken);
    CHECK(*context.told == 1);
    CHECK(context.begin(2) == next);
  }
  SECTION("a pass whose failure was never reported here") {
    const auto forgotten = context.begin(1);
    const auto next = context.begin(2);
    forgotten->fail(kBroken);
    CHECK(*context.told == 0);
    CHECK(context.begin(2) == next);
  }
  CHECK(error_of([&] { context.begin(1); }).kind == ErrorKind::kCancelled);
  // The guard is notified when the next pass fails.
  const int before = *context.told;
  CHECK(context.state->fail_pass(2, kBroken));
  CHECK(*context.told == before + 1);
  CHECK_FALSE(context.state->fail_pass(2, kBroken));
}

TEST_CASE("a pass that fails before it begins here is reported once to its waiters") {
  Cluster cluster(1, set_up);
  Guarded context(cluster[0]);
  CHECK(context.state->fail_pass(1, kBroken));
  CHECK_FALSE(context.state->fail_pass(1, kBroken));
  CHECK(*context.told == 1);
  CHECK(error_of([&] { context.begin(1); }).kind == ErrorKind::kCancelled);
  context.guard();
  CHECK(context.begin(2) != nullptr);
  CHECK(*context.told == 1);
}

TEST_CASE("a gradient of a failed pass is not added to the next pass") {
  Cluster cluster(1, set_up);
  Guarded context(cluster[0]);
  const at::Tensor a = leaf();
  context.begin(1);
  CHECK(context.state->accumulate(a, at::ones({2}, at::kDouble), 1));
  context.state->fail_pass(1, kBroken);
  context.state->take_gradients();
  int called = 0;
  context.state->on_gradient_ready(a, [&](const at::Tensor&) { ++called; });
  context.begin(2);
  CHECK_FALSE(context.state->accumulate(a, at::ones({2}, at::kDouble), 1));
  CHECK(context.state->take_ready_hooks(1, a).empty());
  CHECK_FALSE(context.state->gradient(a).defined());
  CHECK(context.state->take_ready_hooks(2, a).size() == 1);
}

TEST_CASE("a failed call whose error was caught does not spoil a later backward") {
  Cluster cluster(2, set_up);
  Agent& agent = cluster[0];
  const int to = GENERATE(0, 1);
  const at::Tensor a = leaf();
  autograd::Context context(agent);
  CHECK(error_of([&] { agent.rpc_sync<&broken>(to, a); }).message == "broken");
  const auto unknown =
      agent.call_raw(to, "unknown", [&](rpc::Encoder& out) { rpc::encode(out, a); });
  CHECK(error_of([&] { unknown.wait_result().value(); }).kind == ErrorKind::kNotFound);
  autograd::backward(context, {agent.rpc_sync<&times_two>(to, a).sum()});
  CHECK(at::equal(context.gradient(a), at::full({2}, 2.0, at::kDouble)));
}

TEST_CASE("an abandoned call that is answered late does not spoil a later backward") {
  // The handler does not reply; it adds a function to `answers` that the test calls to reply.
  std::mutex mutex;
  std::vector<std::function<void()>> answers;
  Cluster cluster(2, [&](Agent& agent) {
    set_up(agent);
    agent.expose_raw("keep", [&](rpc::CallContext&, rpc::Decoder& in, const rpc::ReplyPtr& reply) {
      std::lock_guard lock(mutex);
      answers.emplace_back([reply, argument = rpc::decode<at::Tensor>(in)] {
        reply->send([&](rpc::Encoder& out) { rpc::encode(out, argument * 3); });
      });
    });
  });
  Agent& agent = cluster[0];
  const int to = GENERATE(0, 1);
  const at::Tensor a = leaf();
  autograd::Context context(agent);
  // Retries with a longer timeout, because a handler that starts after the timeout does not run.
  std::vector<std::function<void()>> late;
  for (auto timeout = std::chrono::milliseconds(10); late.empty(); timeout *= 2) {
    const auto call = agent.call_raw(rpc::To(to).timeout(timeout), "keep",
                                     [&](rpc::Encoder& out) { rpc::encode(out, a); });
    CHECK(error_of([&] { call.wait_result().value(); }).kind == ErrorKind::kDeadline);
    std::lock_guard lock(mutex);
    late = answers;
  }
  // Rank `to` handles this call after the notice that the first call was abandoned.
  const at::Tensor b = agent.rpc_sync<&times_two>(to, a);
  for (const auto& answer : late) answer();
  autograd::backward(context, {b.sum()});
  CHECK(at::equal(context.gradient(a), at::full({2}, 2.0, at::kDouble)));
}

TEST_CASE("an abandoned call whose answer has arrived unread does not spoil a later backward") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(
      2,
      [](Agent& agent) {
        set_up(agent);
        agent.expose<&testing::wait_at_gate>("wait_at_gate");
      },
      options);
  Agent& agent = cluster[0];
  testing::g_gate = false;
  const auto held_up = agent.rpc_async<&testing::wait_at_gate>(0);  // blocks the only worker thread
  testing::wait_for_call_at_gate();
  const at::Tensor a = leaf();
  autograd::Context context(agent);
  const auto call = agent.rpc_async<&times_two>(1, a);
  while (agent.waits().size() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  call.cancel();
  testing::g_gate = true;
  const at::Tensor b = agent.rpc_sync<&times_two>(1, a);
  autograd::backward(context, {b.sum()});
  CHECK(at::equal(context.gradient(a), at::full({2}, 2.0, at::kDouble)));
  held_up.wait();
}

TEST_CASE("an answer in flight when its call is abandoned is no longer waited for") {
  ContextState state(1);
  const at::Tensor sent = leaf() * 2;
  const auto node_for = [&](int caller, uint64_t call) {
    return std::make_shared<autograd::SendNode>(caller, call, std::vector<at::Tensor>{sent});
  };
  const auto given_up = node_for(0, 7), other = node_for(1, 7), argument = node_for(0, 0);
  CHECK(state.add_send(1, given_up));
  CHECK(state.add_send(2, other));
  CHECK(state.add_send(3, argument));
  CHECK(state.give_up(0, 7) == given_up);
  CHECK(state.give_up(0, 8) == nullptr);
  CHECK_FALSE(state.add_send(4, node_for(0, 8)));
  CHECK(state.sends().size() == 2);
  CHECK(state.send(2) == other);
  CHECK(state.send(3) == argument);
}

TEST_CASE("a context sums sparse and dense gradients in any order") {
  ContextState state(1);
  const at::Tensor a = at::zeros({3, 1}, at::kDouble).requires_grad_();
  const at::Tensor rows =
      at::sparse_coo_tensor(at::full({1, 1}, 1, at::kLong), at::ones({1, 1}, at::kDouble), {3, 1});
  const bool sparse_first = GENERATE(true, false);
  for (const bool sparse : {sparse_first, !sparse_first, sparse_first}) {
    state.accumulate(a, sparse ? rows : at::ones({3, 1}, at::kDouble));
  }
  const at::Tensor sum = state.gradient(a);
  const double ones = sparse_first ? 1 : 2, with_row = ones + (sparse_first ? 2 : 1);
  CHECK(at::equal(sum, at::tensor({ones, with_row, ones}, at::kDouble).unsqueeze(1)));
}
