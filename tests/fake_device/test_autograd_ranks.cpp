// Tests distributed autograd with device tensors: the gradients of the oracle's graphs equal those
// on the CPU, whichever devices the ranks use and whichever streams the caller uses.
// ctest: timeout=240
#include <algorithm>
#include <thread>

#include <c10/core/StreamGuard.h>

#include "distrain/rpc/device.h"
#include "oracle/compare.h"
#include "oracle/distrain_runtime.h"
#include "oracle/graphs.h"
#include "support/test_device.h"

namespace distrain::oracle {
namespace {

using c10::StreamGuard;
using rpc::StreamPoint;
using testing::test_device;

at::Tensor to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_sparse()) return tensor.defined() ? tensor.cpu() : tensor;
  return at::sparse_coo_tensor(tensor._indices().cpu(), tensor._values().cpu(), tensor.sizes());
}

// Compares with the tolerance of oracle/test_distrain_autograd.cpp, which gives the reason.
void check_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double largest =
        expected[i].defined() ? expected[i].to_dense().abs().max().item<double>() : 0.0;
    check_same_gradients({to_cpu(actual[i])}, {expected[i]}, 1e-6 * std::max(1.0, largest));
  }
}

/// Gives rank r device r, or all ranks the first device if `shared`.
std::function<void(rpc::AgentOptions&)> on_devices(bool shared) {
  return [shared](rpc::AgentOptions& options) {
    options.device = test_device(shared ? 0 : options.rank);
  };
}

Graph ready_on(const Graph& graph, c10::Device device) {
  const Graph moved = on_device(graph, device);
  StreamPoint::mark(device).wait_on_host();
  return moved;
}

/// Runs each operation on a new stream. Makes streams wait only where a user program must do so.
class HoppingOps final : public RemoteOps {
 public:
  explicit HoppingOps(RemoteOps& ops) : ops_(ops) {}

  at::Tensor mul(const at::Tensor& x, const at::Tensor& y) override {
    return hop({x, y}, [&] { return ops_.mul(x, y); });
  }
  at::Tensor add(const at::Tensor& x, const at::Tensor& y) override {
    return hop({x, y}, [&] { return ops_.add(x, y); });
  }
  at::Tensor nested(const at::Tensor& x, const at::Tensor& y) override {
    return hop({x, y}, [&] { return ops_.nested(x, y); });
  }
  at::Tensor chain(const at::Tensor& x, const at::Tensor& y) override {
    return hop({x, y}, [&] { return ops_.chain(x, y); });
  }
  at::Tensor embedding_bag(const at::Tensor& weight, const at::Tensor& indices,
                           const at::Tensor& offsets, bool sparse) override {
    return hop({weight, indices, offsets},
               [&] { return ops_.embedding_bag(weight, indices, offsets, sparse); });
  }
  at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) override {
    return hop({indices, offsets}, [&] { return ops_.lookup(indices, offsets); });
  }

 private:
  template <class F>
  static at::Tensor hop(const std::vector<at::Tensor>& arguments, F operation) {
    const c10::Device device = arguments[0].device();
    const c10::Stream outer = rpc::current_stream(device), inner = rpc::side_stream(device);
    StreamPoint::mark(outer).make_wait(inner);
    for (const at::Tensor& argument : arguments) rpc::use_on_stream(argument, inner);
    at::Tensor result;
    {
      const StreamGuard guard(inner);
      result = operation();
    }
    StreamPoint::mark(inner).make_wait(outer);
    rpc::use_on_stream(result, outer);
    return result;
  }

  RemoteOps& ops_;
};

Graph hopping(Graph graph) {
  graph.loss = [loss = graph.loss](RemoteOps& ops, const std::vector<at::Tensor>& leaves) {
    HoppingOps hopping_ops(ops);
    return loss(hopping_ops, leaves);
  };
  return graph;
}

void check_nothing_left(DistrainRuntime& runtime) {
  runtime.cluster().shutdown();
  for (int rank = 0; rank < runtime.cluster().size(); ++rank) {
    CHECK(runtime.cluster()[rank].live_contexts() == 0);
    CHECK(runtime.cluster()[rank].live_rrefs() == 0);
  }
}

}  // namespace

TEST_CASE("gradients of ranks with devices are the CPU's") {
  const std::vector<Graph> all = graphs();
  for (const int world_size : {2, 3}) {
    for (const bool shared : {false, true}) {
      DistrainRuntime runtime(world_size, on_devices(shared));
      for (const Graph& graph : all) {
        INFO(graph.name << ", " << world_size << " ranks" << (shared ? ", one device" : ""));
        const Graph there = ready_on(graph, test_device(0));
        for (int repeat = 0; repeat < 3; ++repeat) {
          check_same(runtime.gradients(there), local_gradients(graph));
        }
      }
      check_nothing_left(runtime);
    }
  }
}

TEST_CASE("gradients are the CPU's if the caller uses its own streams") {
  DistrainRuntime runtime(3, on_devices(false));
  for (const Graph& graph : graphs()) {
    INFO(graph.name);
    const Graph there = hopping(ready_on(graph, test_device(0)));
    const auto expected = local_gradients(graph);
    for (int repeat = 0; repeat < 3; ++repeat) {
      check_same(runtime.gradients(there), expected);
      const StreamGuard guard(rpc::side_stream(test_device(0)));
      check_same(runtime.gradients(there), expected);
    }
  }
  check_nothing_left(runtime);
}

TEST_CASE("all graphs run concurrently on devices, each in its own context and streams") {
  const std::vector<Graph> all = graphs();
  DistrainRuntime runtime(3, on_devices(false));
  std::vector<std::vector<at::Tensor>> actual(all.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    threads.emplace_back([&, i] {
      const Graph there = ready_on(all[i], test_device(0));
      const StreamGuard guard(rpc::side_stream(test_device(0)));
      for (int repeat = 0; repeat < 3; ++repeat) {
        actual[i].clear();
        for (const at::Tensor& gradient : runtime.gradients(there)) {
          actual[i].push_back(to_cpu(gradient));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < all.size(); ++i) {
    INFO(all[i].name);
    check_same(actual[i], local_gradients(all[i]));
  }
  check_nothing_left(runtime);
}

}  // namespace distrain::oracle
