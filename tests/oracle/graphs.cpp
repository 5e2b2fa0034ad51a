#include "oracle/graphs.h"

#include <torch/csrc/autograd/autograd.h>

namespace distrain::oracle {
namespace {

using Leaves = std::vector<at::Tensor>;

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape).requires_grad_(true); }

at::Tensor numbers(std::vector<int64_t> values) { return at::tensor(values, at::kLong); }

// Returns 16 indices into 10 rows. The last bag of bag_offsets() begins at 16, so it is empty.
at::Tensor bag_indices(const at::Tensor& beside) {
  return numbers({1, 3, 3, 0, 9, 2, 1, 1, 5, 6, 7, 8, 4, 4, 4, 0}).to(beside.device());
}
at::Tensor bag_offsets(const at::Tensor& beside) {
  return numbers({0, 4, 8, 12, 16}).to(beside.device());
}

// Returns a sum of `y` in which every element has a different weight, to detect swapped gradients.
at::Tensor weighted_sum(const at::Tensor& y) {
  return (y * at::arange(1, y.numel() + 1, y.options()).view(y.sizes())).sum();
}

}  // namespace

std::vector<Graph> graphs() {
  at::manual_seed(11);
  std::vector<Graph> all;
  const auto add = [&](std::string name, Leaves leaves,
                       std::function<at::Tensor(RemoteOps&, const Leaves&)> loss) {
    all.push_back(Graph{std::move(name), std::move(leaves), leaf({10, 3}), std::move(loss)});
  };

  add("one call", {leaf({2, 3}), leaf({2, 3})}, [](RemoteOps& ops, const Leaves& leaves) {
    return weighted_sum(ops.mul(leaves[0], leaves[1]));
  });

  add("a chain of calls with local steps between", {leaf({4}), leaf({4}), leaf({4})},
      [](RemoteOps& ops, const Leaves& leaves) {
        const at::Tensor first = ops.mul(leaves[0], leaves[1]).tanh();
        const at::Tensor second = ops.add(first, leaves[2]);
        return weighted_sum(ops.mul(second, first.exp()));
      });

  add("a leaf shared by two calls and a local step", {leaf({3}), leaf({3})},
      [](RemoteOps& ops, const Leaves& leaves) {
        const at::Tensor a = ops.mul(leaves[0], leaves[1]);
        const at::Tensor b = ops.add(leaves[0], leaves[1]);
        return weighted_sum(a * b + leaves[0]);
      });

  add("one leaf as both arguments", {leaf({3})}, [](RemoteOps& ops, const Leaves& leaves) {
    return weighted_sum(ops.mul(leaves[0], leaves[0]));
  });

  add("an output used twice", {leaf({2, 2}), leaf({2, 2})},
      [](RemoteOps& ops, const Leaves& leaves) {
        const at::Tensor y = ops.mul(leaves[0], leaves[1]);
        return weighted_sum(y.exp() + y * y.sin());
      });

  add("an output used in two further calls", {leaf({3}), leaf({3})},
      [](RemoteOps& ops, const Leaves& leaves) {
        const at::Tensor y = ops.mul(leaves[0], leaves[1]);
        return weighted_sum(ops.mul(ops.add(y, leaves[0]), ops.mul(y, leaves[1])));
      });

  add("nested hops", {leaf({3, 2}), leaf({3, 2})}, [](RemoteOps& ops, const Leaves& leaves) {
    return weighted_sum(ops.nested(leaves[0], leaves[1]));
  });

  add("nested hops in a chain, sharing a leaf", {leaf({4}), leaf({4})},
      [](RemoteOps& ops, const Leaves& leaves) {
        const at::Tensor y = ops.nested(leaves[0], leaves[1]);
        return weighted_sum(ops.nested(y, leaves[0]) + ops.mul(y, leaves[1]));
      });

  add("a chain of results that stay remote", {leaf({4}), leaf({4})},
      [](RemoteOps& ops, const Leaves& leaves) {
        const at::Tensor y = ops.chain(leaves[0], leaves[1].sin());
        return weighted_sum(y * leaves[0]);
      });

  add("an argument without gradient", {leaf({3})}, [](RemoteOps& ops, const Leaves& leaves) {
    return weighted_sum(ops.mul(leaves[0], at::arange(3, leaves[0].options())));
  });

  add("a leaf that the loss does not use", {leaf({3}), leaf({3})},
      [](RemoteOps& ops, const Leaves& leaves) {
        return weighted_sum(ops.mul(leaves[0], leaves[0].detach()));
      });

  add("a broadcast argument", {leaf({4, 3}), leaf({3})}, [](RemoteOps& ops, const Leaves& leaves) {
    return weighted_sum(ops.mul(leaves[0], leaves[1]));
  });

  for (const bool sparse : {false, true}) {
    add(std::string("an embedding bag whose last bag is empty, weight sent, ") +
            (sparse ? "sparse" : "dense"),
        {leaf({10, 3}), leaf({3, 2})}, [sparse](RemoteOps& ops, const Leaves& leaves) {
          const at::Tensor sums =
              ops.embedding_bag(leaves[0], bag_indices(leaves[0]), bag_offsets(leaves[0]), sparse);
          return weighted_sum(sums.matmul(leaves[1]).tanh());
        });
  }

  add("a lookup in a remote table whose last bag is empty", {leaf({3, 2})},
      [](RemoteOps& ops, const Leaves& leaves) {
        return weighted_sum(
            ops.lookup(bag_indices(leaves[0]), bag_offsets(leaves[0])).matmul(leaves[0]).tanh());
      });

  add("two lookups in one remote table", {leaf({3, 2})}, [](RemoteOps& ops, const Leaves& leaves) {
    const at::Tensor first = ops.lookup(bag_indices(leaves[0]), bag_offsets(leaves[0]));
    const at::Tensor second = ops.lookup(bag_offsets(leaves[0]).clamp_max(9),
                                         numbers({0, 1, 2, 3, 4}).to(leaves[0].device()));
    return weighted_sum((first + second.exp()).matmul(leaves[0]));
  });

  return all;
}

Graph on_device(const Graph& graph, c10::Device device) {
  const auto there = [&](const at::Tensor& t) { return t.detach().to(device).requires_grad_(); };
  Graph moved = graph;
  for (at::Tensor& leaf : moved.leaves) leaf = there(leaf);
  moved.table = there(graph.table);
  return moved;
}

std::vector<at::Tensor> local_gradients(const Graph& graph) {
  LocalOps ops(graph.table);
  std::vector<at::Tensor> inputs = graph.leaves;
  inputs.push_back(graph.table);
  return torch::autograd::grad({graph.loss(ops, graph.leaves)}, inputs, {}, std::nullopt,
                               /*create_graph=*/false, /*allow_unused=*/true);
}

}  // namespace distrain::oracle
