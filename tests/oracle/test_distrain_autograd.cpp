// Compares our engine with torch's DistEngine on the same graphs.
//
// Both engines run the same kernels on the same float32 values. Only the order in which the
// gradients of a repeatedly used tensor are summed may differ, which changes the last bit or two.
// The tolerance of an element is 1e-6 of the tensor's largest gradient, or of 1 if that is smaller:
// eight times the spacing of float32 values of that size.
#include <algorithm>
#include <memory>
#include <thread>

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "oracle/compare.h"
#include "oracle/distrain_runtime.h"
#include "oracle/graphs.h"
#include "oracle/official_runtime.h"
#include "support/catch.h"

namespace distrain::oracle {

namespace {

void check_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double largest =
        expected[i].defined() ? expected[i].to_dense().abs().max().item<double>() : 0.0;
    check_same_gradients({actual[i]}, {expected[i]}, 1e-6 * std::max(1.0, largest));
  }
}

}  // namespace

TEST_CASE("our gradients equal those of torch's DistEngine") {
  const std::vector<Graph> all = graphs();
  std::vector<std::vector<at::Tensor>> official;
  {
    OfficialRuntime runtime;
    for (const Graph& graph : all) official.push_back(runtime.gradients(graph));
  }
  for (const int world_size : {2, 3}) {
    DistrainRuntime runtime(world_size);
    for (size_t i = 0; i < all.size(); ++i) {
      INFO(all[i].name << ", " << world_size << " ranks");
      for (int repeat = 0; repeat < 5; ++repeat) {
        check_same(runtime.gradients(all[i]), official[i]);
        check_same(runtime.gradients(all[i]), local_gradients(all[i]));
      }
      for (const at::Tensor& leaf : all[i].leaves) CHECK_FALSE(leaf.grad().defined());
    }
    runtime.cluster().shutdown();
    for (int rank = 0; rank < world_size; ++rank) {
      CHECK(runtime.cluster()[rank].live_contexts() == 0);
      CHECK(runtime.cluster()[rank].live_rrefs() == 0);
    }
  }
}

TEST_CASE("hooks behind a leaf's AccumulateGrad are called as by torch's DistEngine") {
  struct Call {
    size_t leaf;
    size_t outputs;
    at::Tensor gradient;
  };
  const auto calls_in = [](auto& runtime) {
    std::vector<std::vector<Call>> all;
    for (const Graph& graph : graphs()) {
      std::vector<Call>& calls = all.emplace_back();
      std::vector<std::shared_ptr<torch::autograd::Node>> accumulators;
      for (size_t i = 0; i < graph.leaves.size(); ++i) {
        accumulators.push_back(torch::autograd::impl::grad_accumulator(graph.leaves[i]));
        accumulators.back()->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [&calls, i](const torch::autograd::variable_list& outputs,
                        const torch::autograd::variable_list& grads) {
              calls.push_back({i, outputs.size(), grads.at(0).clone()});
              return outputs;
            }));
      }
      runtime.gradients(graph);
      std::sort(calls.begin(), calls.end(),
                [](const Call& a, const Call& b) { return a.leaf < b.leaf; });
    }
    return all;
  };
  std::vector<std::vector<Call>> official;
  {
    OfficialRuntime runtime;
    official = calls_in(runtime);
  }
  DistrainRuntime runtime(2);
  const std::vector<std::vector<Call>> ours = calls_in(runtime);
  REQUIRE(ours.size() == official.size());
  for (size_t g = 0; g < ours.size(); ++g) {
    CAPTURE(g);
    REQUIRE(ours[g].size() == official[g].size());
    for (size_t i = 0; i < ours[g].size(); ++i) {
      CHECK(ours[g][i].leaf == official[g][i].leaf);
      CHECK(ours[g][i].outputs == official[g][i].outputs);
      check_same({ours[g][i].gradient}, {official[g][i].gradient});
    }
  }
  runtime.cluster().shutdown();
}

TEST_CASE("all graphs run concurrently, each in its own context") {
  const std::vector<Graph> all = graphs();
  std::vector<std::vector<at::Tensor>> expected;
  for (const Graph& graph : all) expected.push_back(local_gradients(graph));
  DistrainRuntime runtime(3);
  std::vector<std::vector<at::Tensor>> actual(all.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 5; ++repeat) actual[i] = runtime.gradients(all[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < all.size(); ++i) {
    INFO(all[i].name);
    check_same(actual[i], expected[i]);
  }
  runtime.cluster().shutdown();
}

}  // namespace distrain::oracle
