// ctest: timeout=120
// Tests DistributedDataParallel on a GPU over NCCL. Two ranks on one GPU, over staging, must be two
// processes, because LibTorch has one autograd thread for each GPU and process, in which the ranks
// would wait for each other. So compare_jobs.py tests them by the job hybrid.
#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "distrain/cuda/load.h"
#include "distrain/cuda/nccl_reduce_group.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "gpu/gpu.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

using GroupOf = std::function<std::shared_ptr<collective::ReduceGroup>(
    c10::intrusive_ptr<collective::Backend> backend)>;

using DeviceOf = std::function<c10::Device(int rank)>;

c10::Device on_cpu(int) { return c10::kCPU; }
c10::Device on_first(int) { return gpu(); }

/// Trains by SGD and returns the parameters, copied to the CPU, which must be equal on all ranks.
std::vector<at::Tensor> train_replicas(int size, const DeviceOf& device_of,
                                       const GroupOf& group_of) {
  TestGroup group(size);
  std::vector<std::vector<at::Tensor>> results(static_cast<size_t>(size));
  std::vector<torch::nn::Sequential> modules;
  at::manual_seed(3);
  for (int rank = 0; rank < size; ++rank) {
    modules.emplace_back(torch::nn::Linear(64, 512), torch::nn::BatchNorm1d(512),
                         torch::nn::Linear(512, 512), torch::nn::Linear(512, 10));
    modules.back()->to(at::kDouble);
  }
  std::vector<at::Tensor> inputs;
  for (int i = 0; i < 10 * size; ++i) inputs.push_back(at::randn({32, 64}, at::kDouble));
  run_ranks(size, [&](int rank) {
    const auto index = static_cast<size_t>(rank);
    const c10::Device device = device_of(rank);
    modules[index]->to(device);
    ddp::DistributedDataParallel model(modules[index], group_of(group.backends[index]));
    for (int step = 0; step < 10; ++step) {
      const at::Tensor input = inputs[static_cast<size_t>(step * size + rank)].to(device);
      model.forward(input).pow(2).mean().backward();
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model.parameters()) {
        parameter.sub_(parameter.grad(), 0.05);
        parameter.mutable_grad() = at::Tensor();
      }
    }
    for (const at::Tensor& parameter : model.parameters()) {
      results[index].push_back(parameter.detach().cpu());
    }
  });
  for (const std::vector<at::Tensor>& result : results) {
    REQUIRE(result.size() == results[0].size());
    for (size_t i = 0; i < result.size(); ++i) CHECK(same_bits(result[i], results[0][i]));
  }
  return results[0];
}

std::shared_ptr<collective::ReduceGroup> staged(c10::intrusive_ptr<collective::Backend> backend) {
  return std::make_shared<collective::StagedReduceGroup>(std::move(backend));
}

std::shared_ptr<collective::ReduceGroup> nccl(c10::intrusive_ptr<collective::Backend> backend) {
  return cuda::make_nccl_reduce_group(std::move(backend), cuda::load());
}

void check_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    CHECK(at::allclose(actual[i], expected[i], 1e-6, 1e-8));
  }
}

}  // namespace

TEST_CASE("one rank over NCCL trains as on the CPU") {
  check_close(train_replicas(1, on_first, nccl), train_replicas(1, on_cpu, staged));
}

TEST_CASE("two ranks on two GPUs train as on the CPU, over NCCL", "[two]") {
  check_close(train_replicas(2, test_device, nccl), train_replicas(2, on_cpu, staged));
}
