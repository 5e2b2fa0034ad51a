// Tests that our Reducer and torch's c10d::Reducer, both on our Backend, give the same gradients.
#include <map>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <torch/torch.h>

#include "distrain/ddp/reducer.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

torch::nn::Sequential make_model() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, 300), torch::nn::Tanh(),
                               torch::nn::Linear(300, 1));
}

at::Tensor batch(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(uint64_t(10 * step + rank));
  return at::randn({8, 20}, generator, at::kFloat);
}

std::vector<at::Tensor> gradients(const torch::nn::Sequential& model) {
  std::vector<at::Tensor> result;
  for (const auto& p : model->parameters()) result.push_back(p.grad().clone());
  return result;
}

using Gradients = std::vector<std::vector<at::Tensor>>;  // by step

Gradients with_torch(Backend& backend, torch::nn::Sequential model, int rank, int size) {
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), rank, size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&backend));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  const std::vector<at::Tensor> parameters = model->parameters();
  std::vector<std::vector<size_t>> buckets = {{5, 4}, {3, 2}, {1, 0}};
  c10d::Reducer reducer(parameters, buckets, group, std::vector<bool>(parameters.size(), false),
                        30000, false, false, {}, 10000, false, false, {});
  Gradients result;
  for (int step = 0; step < 4; ++step) {
    model->zero_grad();
    reducer.rebuild_buckets();
    reducer.prepare_for_forward();
    const at::Tensor output = model->forward(batch(rank, step)).pow(2).mean();
    reducer.prepare_for_backward({output});
    output.backward();
    result.push_back(gradients(model));
  }
  return result;
}

Gradients with_ours(const BackendPtr& backend, torch::nn::Sequential model, int rank) {
  std::vector<ddp::NamedParameter> parameters;
  for (const auto& item : model->named_parameters())
    parameters.push_back({item.key(), item.value()});
  ddp::Reducer reducer(parameters, backend,
                       {.bucket_cap_bytes = 30000, .first_bucket_bytes = 10000});
  Gradients result;
  for (int step = 0; step < 4; ++step) {
    model->zero_grad();
    model->forward(batch(rank, step)).pow(2).mean().backward();
    result.push_back(gradients(model));
  }
  return result;
}

}  // namespace

TEST_CASE("our Reducer gives the gradients of torch's on the same Backend") {
  const int size = GENERATE(2, 3);
  TestGroup group(size, {.timeout = std::chrono::seconds(60)});
  std::vector<torch::nn::Sequential> models;
  for (int i = 0; i < 2 * size; ++i) models.push_back(make_model());
  std::vector<Gradients> torchs(static_cast<size_t>(size));
  std::vector<Gradients> ours(static_cast<size_t>(size));
  run_ranks(size, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    torchs[r] = with_torch(group[rank], models[2 * r], rank, size);
    ours[r] = with_ours(group.backends[r], models[2 * r + 1], rank);
  });
  for (size_t rank = 0; rank < torchs.size(); ++rank) {
    for (size_t step = 0; step < 4; ++step) {
      for (size_t i = 0; i < ours[rank][step].size(); ++i) {
        CHECK(at::allclose(ours[rank][step][i], torchs[rank][step][i], 1e-5, 1e-7));
        CHECK(same_bits(ours[rank][step][i], ours[0][step][i]));
        CHECK(same_bits(torchs[rank][step][i], torchs[0][step][i]));
      }
    }
  }
}
