// Tests which device a rank uses, and that its threads create device contexts on no other device.
#include <ATen/ATen.h>

#include "distrain/autograd/context.h"
#include "distrain/cuda/nccl_reduce_group.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/device.h"
#include "fake_device/fake_nccl.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/fake_device.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

const at::TensorOptions kSomeDevice(c10::kPrivateUse1);  // the current device of the thread

at::Tensor doubled(at::Tensor x) { return x * 2; }
std::string device_of_new() { return at::empty({1}, kSomeDevice).device().str(); }
std::string go_elsewhere() {
  rpc::make_current(fake(3));
  return device_of_new();
}
at::Tensor failing(at::Tensor x) {
  throw base::Exception(base::ErrorKind::kInvalid, std::to_string(x.numel()));
}

void expose_places(rpc::Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
  agent.expose<&doubled>("doubled");
  agent.expose<&device_of_new>("device_of_new");
  agent.expose<&go_elsewhere>("go_elsewhere");
  agent.expose<&failing>("failing");
}

}  // namespace

TEST_CASE("a device without an index is the rank's own") {
  rpc::AgentOptions options;
  options.device = c10::kPrivateUse1;
  Cluster ranks(kFakeDevices + 1, {}, options);
  for (int rank = 0; rank < ranks.size(); ++rank) {
    CHECK(ranks[rank].device() == fake(rank % kFakeDevices));
    CHECK(ranks[0].device_of(rank) == ranks[rank].device().str());
  }
  ranks.shutdown();
}

TEST_CASE("the rank's device is current in join() and at the beginning of each handler") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster ranks(2, expose_places, options,
                [](rpc::AgentOptions& o) { o.device = fake(2 - o.rank); });
  std::string after_join;
  ranks.on_all([&](rpc::Agent& agent) {
    if (agent.rank() == 0) after_join = device_of_new();
  });
  CHECK(after_join == "fake:0");  // join() changes the device of its own thread only
  for (int round = 0; round < 3; ++round) {
    CHECK(ranks[0].rpc_sync<&device_of_new>(1) == "fake:1");
    CHECK(ranks[0].rpc_sync<&go_elsewhere>(1) == "fake:3");
  }
  CHECK(ranks[1].rpc_sync<&device_of_new>(0) == "fake:2");
  ranks.shutdown();
  std::thread([] {
    rpc::AgentOptions alone;
    alone.names = {"w0"};
    rpc::Agent agent(alone);
    agent.join([&] {
      agent.set_device(fake(2));
      expect(device_of_new() == "fake:2", "not current in prepare()");
    });
    expect(device_of_new() == "fake:2", "not current behind join()");
    agent.shutdown();
  }).join();
}

TEST_CASE("ranks on the second device create no context on the first") {
  reset_fake_contexts();
  {
    rpc::AgentOptions options;
    options.device = fake(1);
    Cluster ranks(3, expose_places, options);
    const at::Tensor x = at::ones({700'000}).to(fake(1));  // large enough to be sent in chunks
    at::Tensor w = at::ones({3}).to(fake(1)).requires_grad_();
    rpc::Agent& agent = ranks[0];
    CHECK(agent.rpc_sync<&doubled>(1, x).mean().item<float>() == 2);
    CHECK(error_of([&] { agent.rpc_sync<&failing>(1, x); }).kind == base::ErrorKind::kInvalid);
    CHECK(agent.rpc_async<&doubled>(1, x)
              .then(agent.executor(), [](at::Tensor& y) { return y.sum().item<float>(); })
              .wait() == 2 * 700'000);
    {
      optim::DistributedOptimizer optimizer(agent, {agent.make_rref(w)}, optim::Sgd{.lr = 0.5});
      autograd::Context context(agent);
      autograd::backward(context, {agent.rpc_sync<&doubled>(2, w).sum()});
      optimizer.step(context);
    }
    CHECK(w.sum().item<float>() == 0);
    ranks.kill(2);
    CHECK(error_of([&] { agent.rpc_sync<&doubled>(2, x); }).kind == base::ErrorKind::kPeerLost);
  }
  {
    FakeNccl nccl;
    TestGroup group(2);
    run_ranks(2, [&](int rank) {
      const auto made = cuda::make_nccl_reduce_group(group.backends[size_t(rank)], nccl);
      collective::ReduceGroup& reduce = *made;
      const at::Tensor tensor = at::ones({10}, at::TensorOptions(fake(1)));
      reduce.average_async(tensor)->wait();
      RANK_CHECK(tensor.sum().item<float>() == 10);
      if (rank == 0) nccl.fail_call(0);
      error_of(
          [&] { reduce.average_async(tensor)->wait(); });  // rank 0 aborts, and rank 1 is notified
      error_of([&] { reduce.average_async(tensor)->wait(); });
    });
  }
  CHECK(fake_contexts(0) == "");
  const std::string made = fake_contexts(1);
  CAPTURE(made);
  for (const char* thread : {"dt-work", "distrain-nccl"}) {
    CHECK(made.find(thread) != std::string::npos);
  }
}
