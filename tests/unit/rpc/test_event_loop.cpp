// A thread that waits for a reply runs the event loop of its agent, and so callbacks of other
// calls.
#include <atomic>
#include <thread>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include "distrain/rpc/agent.h"
#include "distrain/rpc/autograd_hook.h"
#include "gate.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using base::ErrorKind;
using testing::add;
using testing::Cluster;
using testing::error_of;
using testing::g_gate;
using testing::wait_at_gate;

namespace {

void pass() {}
at::Tensor same_tensor(const at::Tensor& x) { return x; }

void expose_for_loop(rpc::Agent& agent) {
  agent.expose<&pass>("pass");
  agent.expose<&add>("add");
  agent.expose<&wait_at_gate>("wait_at_gate");
}

// Makes calls until this thread has run the callback of a reply, and runs `action` in that
// callback. Without a value, the reply needs no worker, so the thread that runs the loop completes
// the call.
template <class Action>
void run_in_callback(rpc::Agent& agent, const Action& action) {
  const std::thread::id self = std::this_thread::get_id();
  const base::TimePoint end = base::deadline_after(45s);
  const std::shared_ptr<base::Executor> executor = agent.inline_executor().shared_from_this();
  std::atomic<bool> ran{false};
  while (!ran && base::Clock::now() < end) {
    const auto called = std::make_shared<base::Promise<void>>();
    const base::Future<void> call = agent.rpc_async<&pass>(1);
    call.on_complete(*executor, [&, called](base::Result<base::Unit>&) {
      // If the call is done already, this callback does not run on the loop.
      const bool is_here = base::thread_state().must_not_wait && std::this_thread::get_id() == self;
      if (is_here && !ran.exchange(true)) action();
      called->set();
    });
    call.wait();
    called->future().wait();
  }
  REQUIRE(ran);
}

}  // namespace

TEST_CASE("a callback of the loop does not get the state of the waiting thread that runs it") {
  Cluster cluster(2, expose_for_loop);
  base::Future<bool> is_clean;
  {
    const at::NoGradGuard no_grad;
    const rpc::ContextScope scope(cluster[0], 77);
    run_in_callback(cluster[0], [&] {
      is_clean = base::Future<void>::ready({}).then(cluster[0].executor(), [] {
        return at::GradMode::is_enabled() && rpc::current_context() == 0;
      });
    });
    CHECK(rpc::current_context() == 77);
  }
  CHECK(is_clean.wait());
  cluster.shutdown();
}

TEST_CASE("a callback that a waiting thread runs may call and cancel") {
  Cluster cluster(2, expose_for_loop);
  g_gate = false;
  auto stuck = cluster[0].rpc_async<&wait_at_gate>(rpc::To(1).without_deadline());
  base::Future<int64_t> sum;
  run_in_callback(cluster[0], [&] {
    stuck.cancel();
    sum = cluster[0].rpc_async<&add>(1, 2, 3);
  });
  CHECK(error_of([&] { stuck.wait(); }).kind == ErrorKind::kCancelled);
  CHECK(sum.wait() == 5);
  g_gate = true;
  cluster.shutdown();
}

TEST_CASE("a callback that a waiting thread runs may destroy the agent") {
  Cluster cluster(2, expose_for_loop);
  std::unique_ptr<rpc::Agent> agent = cluster.take_out(0);
  run_in_callback(*agent, [&] { agent = nullptr; });
  // Rank 0 is lost to rank 1.
  while (error_of([&] { cluster[1].rpc_sync<&pass>(0); }).kind != ErrorKind::kPeerLost) {
  }
}

TEST_CASE("an agent may end while threads wait for its calls") {
  for (int i = 0; i < 20; ++i) {
    Cluster cluster(2, expose_for_loop);
    g_gate = false;
    auto stuck = cluster[0].rpc_async<&wait_at_gate>(rpc::To(1).without_deadline());
    std::vector<std::thread> waiting;
    std::atomic<int> cancelled{0};
    for (int t = 0; t < 2; ++t) {
      waiting.emplace_back([&, stuck] {
        if (error_of([&] { stuck.wait(); }).kind == ErrorKind::kCancelled) ++cancelled;
      });
    }
    if (i % 2 == 0) testing::wait_for_call_at_gate();
    cluster.kill(0);
    for (std::thread& thread : waiting) thread.join();
    CHECK(cancelled == 2);
    g_gate = true;
  }
}

TEST_CASE("a thread that waits for one agent runs no callback of another agent in its process") {
  Cluster cluster(3, expose_for_loop);
  const std::thread::id self = std::this_thread::get_id();
  std::atomic<int> strange{0}, completed{0};
  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over) {
      const auto call = cluster[2].rpc_async<&pass>(1);
      call.on_complete(cluster[2].inline_executor(), [&](base::Result<base::Unit>&) {
        if (std::this_thread::get_id() == self) ++strange;
        ++completed;
      });
      std::this_thread::yield();
      call.wait();
    }
  });
  for (int i = 0; i < 300 || completed < 300; ++i) cluster[0].rpc_sync<&pass>(1);
  over = true;
  other.join();
  CHECK(strange == 0);
  cluster.shutdown();
}

TEST_CASE(
    "a small reply to rpc_async needs no worker, and gets no state of the thread that decodes it") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(
      2,
      [](rpc::Agent& agent) {
        expose_for_loop(agent);
        agent.expose<&same_tensor>("same_tensor");
      },
      options);
  g_gate = false;
  auto busy = cluster[1].rpc_async<&wait_at_gate>(rpc::To(0).without_deadline());
  testing::wait_for_call_at_gate();
  const auto sum = cluster[0].rpc_async<&add>(1, 2, 3);
  const bool is_done = sum.wait_until(base::deadline_after(30s));
  if (!is_done) g_gate = true;  // so that the test ends
  CHECK(is_done);
  {
    const c10::InferenceMode inference;
    const at::Tensor x = at::arange(3);
    for (int i = 0; i < 20; ++i) {
      const at::Tensor y = cluster[0].rpc_async<&same_tensor>(1, x).wait();
      CHECK(at::equal(x, y));
      CHECK_FALSE(y.is_inference());
    }
  }
  g_gate = true;
  busy.wait();
  cluster.shutdown();
}
