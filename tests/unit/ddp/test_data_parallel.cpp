#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "distrain/ddp/distributed_data_parallel.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"
#include "unit/ddp/manual_pass.h"

using namespace distrain;
using namespace distrain::testing;
using ddp::DistributedDataParallel;

TEST_CASE("replicas start and stay equal") {
  TestGroup group(2);
  std::vector<torch::nn::Linear> modules;
  for (int rank = 0; rank < 2; ++rank) modules.emplace_back(16, 8);
  const at::Tensor start = modules[0]->weight.detach().clone();
  run_ranks(2, [&](int rank) {
    DistributedDataParallel model(modules[size_t(rank)], group.backends[size_t(rank)]);
    RANK_CHECK(same_bits(model.module()->weight.detach(), start));
    for (int step = 0; step < 5; ++step) {
      const at::Tensor loss = model.forward(at::full({2, 16}, double(rank + step))).pow(2).sum();
      if (step % 2) {
        loss.backward();
      } else {
        ManualPass pass(model.reducer());
        pass.backward(loss, model.parameters());
        for (at::Tensor& p : model.parameters()) p.mutable_grad() = pass.gradient(p);
      }
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : model.parameters()) {
        p.sub_(p.grad(), 1e-3);
        p.mutable_grad() = at::Tensor();
      }
    }
  });
  CHECK(same_bits(modules[0]->weight.detach(), modules[1]->weight.detach()));
  CHECK_FALSE(at::equal(modules[0]->weight.detach(), start));
}

TEST_CASE("gradients are means over the ranks that have data, or over all as in torch's Join") {
  // After PyTorch's tests of uneven inputs: rank r of 3 has 2 + 3r batches, or rank 0 alone has
  // any.
  const bool one_has_all = GENERATE(false, true);
  const bool over_data = GENERATE(true, false);
  const auto batches = [&](int rank) { return one_has_all ? (rank == 0 ? 4 : 0) : 2 + 3 * rank; };
  const auto input = [](int rank, int step) { return at::full({2, 16}, 0.1 * rank + step); };
  TestGroup group(3);
  std::vector<torch::nn::Linear> modules;
  for (int rank = 0; rank < 3; ++rank) modules.emplace_back(16, 8);
  torch::nn::Linear reference(16, 8);
  {
    const at::NoGradGuard no_grad;
    reference->weight.copy_(modules[0]->weight);
    reference->bias.copy_(modules[0]->bias);
  }
  const auto update = [](auto parameters) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : parameters) {
      p.sub_(p.grad(), 1e-3);
      p.mutable_grad() = at::Tensor();
    }
  };
  const auto with_data = [&](int step) {
    int count = 0;
    for (int rank = 0; rank < 3; ++rank) count += step < batches(rank) ? 1 : 0;
    return count;
  };
  for (int step = 0; with_data(step) > 0; ++step) {
    for (int rank = 0; rank < 3; ++rank) {
      if (step >= batches(rank)) continue;
      const at::Tensor loss = reference->forward(input(rank, step)).pow(2).mean();
      (loss / (over_data ? with_data(step) : 3)).backward();
    }
    update(reference->parameters());
  }
  run_ranks(3, [&](int rank) {
    DistributedDataParallel model(modules[size_t(rank)], group.backends[size_t(rank)]);
    for (int step = 0; with_data(step) > 0; ++step) {
      if (over_data) model.reducer().scale_means(3.0 / with_data(step));
      const bool has_data = step < batches(rank);
      const at::Tensor out = model.forward(has_data ? input(rank, step) : at::empty({0, 16}));
      (has_data ? out.pow(2).mean() : out.sum()).backward();
      update(model.parameters());
    }
  });
  for (const auto& module : modules) {
    CHECK(at::allclose(module->weight, reference->weight, 1e-6, 1e-6));
    CHECK(same_bits(module->bias.detach(), modules[0]->bias.detach()));
  }
}

TEST_CASE("buffers come from rank 0 before each forward in training mode") {
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    DistributedDataParallel model(torch::nn::BatchNorm1d(4), group.backends[size_t(rank)]);
    for (int step = 0; step < 3; ++step) {
      model.forward(at::full({8, 4}, double(rank + 1))).sum().backward();
    }
    // The running mean reflects rank 0's data for two steps, then this rank's data for one step.
    at::Tensor wanted = at::zeros({4});
    for (int step = 0; step < 3; ++step) wanted = 0.9 * wanted + 0.1 * (step < 2 ? 1 : rank + 1);
    RANK_CHECK(at::allclose(model.module()->running_mean, wanted));
    RANK_CHECK(model.module()->num_batches_tracked.item<int64_t>() == 3);
    if (rank != 0) return;
    model.module()->eval();
    model.forward(at::ones({2, 4}));  // does not communicate with the others
  });
}

TEST_CASE("different models are refused on every rank, naming rank and parameter") {
  TestGroup group(3, {.timeout = std::chrono::seconds(20)});
  const auto make = [&](int rank, auto module) {
    const base::Error error =
        thrown_by([&] { DistributedDataParallel model(module, group.backends[size_t(rank)]); });
    RANK_CHECK(error.kind == base::ErrorKind::kInvalid);
    return error;
  };
  run_ranks(3, [&](int rank) {
    const base::Error error = make(rank, torch::nn::Linear(16, rank == 2 ? 9 : 8));
    RANK_CHECK(error.rank == 2);
    RANK_CHECK(contains(error.message, "rank 2 has 'weight: Float [9, 16]'"));
    RANK_CHECK(contains(error.message, "rank 0 has 'weight: Float [8, 16]'"));
  });
  run_ranks(3, [&](int rank) {
    const base::Error error =
        make(rank, torch::nn::Linear(torch::nn::LinearOptions(4, 2).bias(rank != 1)));
    RANK_CHECK(error.rank == 1);
    RANK_CHECK(contains(error.message, "rank 1 has nothing"));
    RANK_CHECK(contains(error.message, "'bias: Float [2]'"));
  });
  run_ranks(3, [&](int rank) {
    torch::nn::Linear frozen(4, 2);
    if (rank == 1) frozen->bias.set_requires_grad(false);
    RANK_CHECK(contains(make(rank, frozen).message, "without gradient"));
  });
}

TEST_CASE("a nested model is held by a shared_ptr") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    auto module = std::make_shared<torch::nn::SequentialImpl>(
        torch::nn::Linear(3, 5), torch::nn::BatchNorm1d(5), torch::nn::Linear(5, 1));
    DistributedDataParallel model(module, group.backends[size_t(rank)]);
    model.forward(at::ones({4, 3}) * double(rank)).sum().backward();
    for (const at::Tensor& p : model.parameters()) RANK_CHECK(p.grad().defined());
  });
}
