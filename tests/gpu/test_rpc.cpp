// ctest: timeout=120
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "gpu/gpu.h"
#include "support/catch.h"

using namespace distrain;
using base::ErrorKind;
using rpc::Agent;
using testing::error_of;
using testing::gpu;
using testing::gpu_cluster;
using testing::keep_busy;
using testing::test_device;

namespace {

at::Tensor echo(at::Tensor a) { return a; }
at::Tensor sum_late(at::Tensor a) {
  keep_busy(a.device());
  return a.sum();
}
std::string device_of(at::Tensor a) { return a.device().str(); }
std::tuple<at::Tensor, at::Tensor> swap(at::Tensor a, at::Tensor b) { return {b, a}; }
at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }

void expose_places(Agent& agent) {
  agent.expose<&echo>("echo");
  agent.expose<&sum_late>("sum_late");
  agent.expose<&device_of>("device_of");
  agent.expose<&swap>("swap");
  agent.expose<&add>("add");
}

}  // namespace

TEST_CASE("tensors of a GPU arrive on the GPU, whatever their size, type and layout") {
  auto cluster = gpu_cluster(2, expose_places);
  Agent& agent = cluster[0];
  CHECK(agent.device_of(1) == "cuda:0");
  const auto on_gpu = at::device(gpu());
  std::vector<at::Tensor> tensors = {
      at::empty({0}, on_gpu),
      at::ones({}, on_gpu),
      at::arange(7, on_gpu),
      at::rand({300, 200}, on_gpu).t(),
      at::rand({2, 3, 5, 7}, on_gpu).contiguous(at::MemoryFormat::ChannelsLast),
      at::rand({1 << 20}, on_gpu).to(at::kBFloat16),
      at::rand({(1 << 24) + 13}, on_gpu),  // 64 MiB, in chunks
      at::rand({100}, on_gpu).slice(0, 10, 20),
  };
  for (const at::Tensor& tensor : tensors) {
    INFO(tensor.sizes() << ' ' << tensor.scalar_type());
    CHECK(agent.rpc_sync<&device_of>("w1", tensor) == "cuda:0");
    const at::Tensor back = agent.rpc_sync<&echo>("w1", tensor);
    CHECK(back.device() == gpu());
    if (tensor.numel() > 0) CHECK(back.data_ptr() != tensor.data_ptr());
    CHECK(at::equal(back, tensor));
    if (tensor.is_contiguous(at::MemoryFormat::ChannelsLast) && tensor.dim() == 4) {
      CHECK(back.strides() == tensor.strides());
    }
  }
  const at::Tensor host = at::rand({1000});
  CHECK(agent.rpc_sync<&device_of>("w1", host) == "cpu");
  const auto [first, second] = agent.rpc_sync<&swap>("w1", host, tensors[3]);
  CHECK(first.device() == gpu());
  CHECK(second.device().is_cpu());
  CHECK(at::equal(first, tensors[3]));
  CHECK(at::equal(second, host));
  cluster.shutdown();
}

TEST_CASE("ranks on the second GPU create no context on the first", "[two]") {
  rpc::AgentOptions options;
  options.device = test_device(1);
  testing::Cluster cluster(2, expose_places, options);
  for (const int64_t size : {1, 1 << 20}) {
    const at::Tensor tensor = at::ones({size}, at::device(test_device(1)));
    CHECK(at::equal(cluster[0].rpc_sync<&add>("w1", tensor, tensor), tensor * 2));
  }
  cluster.shutdown();
  CHECK(at::detail::getCUDAHooks().hasPrimaryContext(1));
  CHECK_FALSE(at::detail::getCUDAHooks().hasPrimaryContext(0));
}

TEST_CASE("the sent values are those that the stream of the sender, or of the function, computes") {
  auto cluster = gpu_cluster(2, expose_places);
  Agent& agent = cluster[0];
  for (int round = 0; round < 5; ++round) {
    keep_busy(gpu());
    at::Tensor tensor = at::full({1 << 20}, double(round + 1), at::device(gpu()));
    base::Future<at::Tensor> sum = agent.rpc_async<&sum_late>("w1", tensor);
    base::Future<at::Tensor> twice = agent.rpc_async<&add>("w1", tensor, tensor);
    CHECK(sum.wait().item<float>() == float(round + 1) * (1 << 20));
    CHECK(at::equal(twice.wait(), tensor * 2));
  }
  cluster.shutdown();
}

TEST_CASE("many concurrent calls carry the right tensors", "[memcheck]") {
  auto cluster = gpu_cluster(2, expose_places);
  Agent& agent = cluster[0];
  std::vector<at::Tensor> tensors;
  std::vector<base::Future<at::Tensor>> replies;
  for (int i = 0; i < 100; ++i) {
    tensors.push_back(at::rand({1 << (i % 18)}, at::device(gpu())));
    replies.push_back(agent.rpc_async<&add>("w1", tensors.back(), tensors.back()));
  }
  for (size_t i = 0; i < replies.size(); ++i) {
    CHECK(at::equal(replies[i].wait(), tensors[i] * 2));
  }
  cluster.shutdown();
}

TEST_CASE("a GPU tensor without a device on the receiver is refused, not copied") {
  gpu();
  testing::Cluster cluster(2, expose_places);
  const at::Tensor tensor = at::ones({3}, at::device(gpu()));
  const base::Error error = error_of([&] { cluster[0].rpc_sync<&echo>("w1", tensor); });
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.message.find("device") != std::string::npos);
  CHECK(at::equal(cluster[0].rpc_sync<&echo>("w1", tensor.cpu()), tensor.cpu()));
  cluster.shutdown();
}
