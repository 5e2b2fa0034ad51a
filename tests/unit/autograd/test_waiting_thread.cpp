// The thread that waits in backward() runs the gradients that it receives itself.
#include <thread>

#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;

namespace {

at::Tensor twice(const at::Tensor& x) { return x * 2; }

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
