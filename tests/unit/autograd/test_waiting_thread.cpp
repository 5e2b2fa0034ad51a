// The thread that waits in backward() runs the gradients that it receives itself.
#include <atomic>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "distrain/autograd/context.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;

namespace {

at::Tensor twice(const at::Tensor& x) { return x * 2; }

std::atomic<std::thread::id> forward_thread, hook_thread;

/// Notes the threads of its forward and backward pass.
at::Tensor noted(const at::Tensor& x) {
  forward_thread = std::this_thread::get_id();
  const at::Tensor y = x * 2;
  y.register_hook([](const at::Tensor&) { hook_thread = std::this_thread::get_id(); });
  return y;
}

/// Its backward pass runs a pass of another context over rank 0.
at::Tensor with_inner_pass(rpc::CallContext& call, const at::Tensor& x) {
  const at::Tensor y = x * 2;
  y.register_hook([&agent = call.agent](const at::Tensor&) {
    const at::AutoGradMode records(true);
    autograd::Context context(agent);
    const at::Tensor z = agent.rpc_sync<&noted>(0, at::ones({2}).requires_grad_());
    autograd::backward(context, {z.sum()});
  });
  return y;
}

}  // namespace

TEST_CASE("a thread in backward() runs the hooks of gradients that it receives, which may call") {
  testing::Cluster cluster(2, [](rpc::Agent& agent) {
    autograd::install(agent);
    agent.expose<&twice>("twice");
  });
  const std::thread::id self = std::this_thread::get_id();
  const at::Tensor x = at::ones({2}).requires_grad_();
  bool ran_here = false;
  x.register_hook([&](const at::Tensor& gradient) {
    ran_here = ran_here || std::this_thread::get_id() == self;
    return cluster[0].rpc_sync<&twice>(1, gradient);
  });
  // If another thread receives the gradients, a worker runs them.
  const base::TimePoint end = base::deadline_after(45s);
  while (!ran_here && base::Clock::now() < end) {
    autograd::Context context(cluster[0]);
    autograd::backward(context, {cluster[0].rpc_sync<&twice>(1, x).sum()});
    CHECK(at::equal(context.gradient(x), at::full({2}, 4.0F)));
  }
  CHECK(ran_here);
}

TEST_CASE("a thread in backward() leaves other functions and contexts to the workers") {
  testing::Cluster cluster(2, [](rpc::Agent& agent) {
    autograd::install(agent);
    agent.expose<&noted>("noted");
    agent.expose<&with_inner_pass>("with_inner_pass");
  });
  const at::Tensor x = at::ones({2}).requires_grad_();
  for (int i = 0; i < 50; ++i) {
    forward_thread = std::thread::id();
    hook_thread = std::thread::id();
    autograd::Context context(cluster[0]);
    autograd::backward(context, {cluster[0].rpc_sync<&with_inner_pass>(1, x).sum()});
    const std::thread::id none, forward = forward_thread, hook = hook_thread;
    REQUIRE(forward != none);
    REQUIRE(hook != none);
    REQUIRE(forward != std::this_thread::get_id());
    REQUIRE(hook != std::this_thread::get_id());
  }
}
