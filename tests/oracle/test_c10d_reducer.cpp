// Tests that our Reducer and torch's c10d::Reducer, both on our Backend, give the same gradients.
#include <cmath>
#include <functional>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
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
  for (const auto& p : model->parameters()) {
    result.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
  }
  return result;
}

using Gradients = std::vector<std::vector<at::Tensor>>;  // by step

// What both Reducers do.
struct Case {
  bool accumulates = false;  // averages only every second pass
  bool halves = false;       // the hook for float16
  bool finds_unused = false, is_static = false;
};

// Makes the passes of one rank. Calls `before` before each forward pass and `after` with its
// output. Passes that may leave out parameters leave out the last layer, in every step or every
// second one.
Gradients passes(torch::nn::Sequential model, int rank, const Case& what,
                 const std::function<void(bool averages)>& before,
                 const std::function<void(bool averages, const at::Tensor& output)>& after) {
  Gradients result;
  for (int step = 0; step < 4; ++step) {
    const bool averages = !what.accumulates || step % 2 == 1;
    if (!what.accumulates || step % 2 == 0) model->zero_grad();
    before(averages);
    at::Tensor output = batch(rank, step);
    const bool leaves_out = what.is_static || (what.finds_unused && step % 2 == 1);
    for (size_t i = 0; i < (leaves_out ? size_t{3} : model->size()); ++i) {
      output = i % 2 == 1 ? at::tanh(output) : model[i]->as<torch::nn::Linear>()->forward(output);
    }
    output = output.pow(2).mean();
    after(averages, output);
    output.backward();
    result.push_back(gradients(model));
  }
  return result;
}

Gradients with_torch(Backend& backend, torch::nn::Sequential model, int rank, int size,
                     const Case& what) {
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), rank, size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&backend));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  const std::vector<at::Tensor> parameters = model->parameters();
  std::vector<std::vector<size_t>> buckets = {{5, 4}, {3, 2}, {1, 0}};
  const auto made = std::make_shared<c10d::Reducer>(
      parameters, buckets, group, std::vector<bool>(parameters.size(), false), 30000,
      what.finds_unused, /*gradient_as_bucket_view=*/true,
      std::unordered_map<size_t, std::string>(), 10000, false, false, std::vector<int64_t>());
  c10d::Reducer& reducer = *made;
  const auto logger = std::make_shared<c10d::Logger>(made);
  reducer.set_logger(logger);
  if (what.halves) reducer.register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
  if (what.is_static) reducer.set_static_graph();
  return passes(
      model, rank, what,
      [&](bool averages) {
        if (!averages) return;
        reducer.rebuild_buckets();
        reducer.prepare_for_forward();
      },
      [&, is_first = what.is_static](bool averages, const at::Tensor& output) mutable {
        if (averages) reducer.prepare_for_backward({output});
        // The first pass of a static graph is averaged at its end, as Python's _DDPSink has it.
        if (!std::exchange(is_first, false)) return;
        output.register_hook([&](const at::Tensor&) {
          torch::autograd::Engine::get_default_engine().queue_callback(
              [&] { reducer.delay_all_reduce(); });
        });
      });
}

Gradients with_ours(const BackendPtr& backend, torch::nn::Sequential model, int rank,
                    const Case& what) {
  std::vector<ddp::NamedParameter> parameters;
  for (const auto& item : model->named_parameters())
    parameters.push_back({item.key(), item.value()});
  ddp::Reducer reducer(parameters, backend,
                       {.bucket_cap_bytes = 30000,
                        .first_bucket_bytes = 10000,
                        .find_unused_parameters = what.finds_unused,
                        .static_graph = what.is_static,
                        .hook = what.halves ? ddp::compress_hook(at::kHalf) : ddp::CommHook{}});
  return passes(
      model, rank, what, [&](bool averages) { reducer.count_forward(/*is_local=*/!averages); },
      [](bool, const at::Tensor&) {});
}

}  // namespace

TEST_CASE("our Reducer gives the gradients of torch's on the same Backend") {
  const int size = GENERATE(2, 3);
  const Case what = GENERATE(Case{}, Case{.accumulates = true}, Case{.halves = true},
                             Case{.finds_unused = true}, Case{.is_static = true},
                             Case{.accumulates = true, .halves = true, .finds_unused = true});
  INFO("accumulates " << what.accumulates << ", halves " << what.halves << ", finds_unused "
                      << what.finds_unused << ", is_static " << what.is_static);
  TestGroup group(size, {.timeout = std::chrono::seconds(60)});
  std::vector<torch::nn::Sequential> models;
  for (int i = 0; i < 2 * size; ++i) models.push_back(make_model());
  std::vector<Gradients> torchs(static_cast<size_t>(size));
  std::vector<Gradients> ours(static_cast<size_t>(size));
  run_ranks(size, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    torchs[r] = with_torch(group[rank], models[2 * r], rank, size, what);
    ours[r] = with_ours(group.backends[r], models[2 * r + 1], rank, what);
  });
  for (size_t rank = 0; rank < torchs.size(); ++rank) {
    for (size_t step = 0; step < 4; ++step) {
      for (size_t i = 0; i < ours[rank][step].size(); ++i) {
        const at::Tensor &mine = ours[rank][step][i], &its = torchs[rank][step][i];
        REQUIRE(mine.defined() == its.defined());
        if (!mine.defined()) continue;
        // Torch divides in float16 and adds in it, ours adds in float32 and divides there: up to
        // `size` + 2 roundings to 11 bits, of values that may be larger than their mean.
        const double scale = its.abs().max().item<double>();
        const double tolerance = what.halves ? 8 * std::pow(2, -11) * scale : 1e-7;
        CHECK(at::allclose(mine, its, 1e-5, tolerance));
        if (what.accumulates && step % 2 == 0) continue;  // not averaged
        CHECK(same_bits(mine, ours[0][step][i]));
        CHECK(same_bits(its, torchs[0][step][i]));
      }
    }
  }
}
