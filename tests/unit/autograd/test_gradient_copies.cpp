// Tests when a context keeps the tensor that a backward function returned, and when a copy.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include "../src/autograd/runtime.h"
#include "distrain/autograd/context.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using testing::Cluster;

// A namespace of its own, because a unity build joins this file with others.
namespace gradient_copies {

namespace {

using Tensors = std::vector<at::Tensor>;
using Saved = torch::autograd::AutogradContext;

const void* g_memory = nullptr;  // the memory of the gradient in the last backward function
Tensors g_kept;                  // tensors that KeepsParts has kept

const void* memory_of(const at::Tensor& gradient) {
  return (gradient.is_sparse() ? gradient._values() : gradient).data_ptr();
}

/// Passes one gradient on, to one leaf or to two.
struct PassesOn : torch::autograd::Function<PassesOn> {
  static at::Tensor forward(Saved*, const at::Tensor& x) { return x.view_as(x); }
  static Tensors backward(Saved*, const Tensors& gradients) {
    g_memory = memory_of(gradients[0]);
    return gradients;
  }
};
struct PassesOnToTwo : torch::autograd::Function<PassesOnToTwo> {
  static at::Tensor forward(Saved*, const at::Tensor& x, const at::Tensor& y) { return x + y; }
  static Tensors backward(Saved*, const Tensors& gradients) {
    g_memory = memory_of(gradients[0]);
    return {gradients[0], gradients[0]};
  }
};
/// Gives a gradient all of whose elements are one element in memory.
struct Expands : torch::autograd::Function<Expands> {
  static at::Tensor forward(Saved* saved, const at::Tensor& x) {
    saved->saved_data["sizes"] = x.sizes().vec();
    return at::ones({1});
  }
  static Tensors backward(Saved* saved, const Tensors&) {
    return {at::ones({1}).expand(saved->saved_data["sizes"].toIntVector())};
  }
};
/// Gives two leaves one sparse gradient, whose rows are one row in memory.
struct ExpandsRows : torch::autograd::Function<ExpandsRows> {
  static at::Tensor forward(Saved*, const at::Tensor& x, const at::Tensor& y) { return x + y; }
  static Tensors backward(Saved*, const Tensors&) {
    const at::Tensor rows = at::sparse_coo_tensor(at::ones({1, 1}, at::kLong).expand({1, 8}),
                                                  at::rand({1, 3}).expand({8, 3}), {10, 3});
    g_memory = memory_of(rows);
    return {rows, rows};
  }
};
/// Keeps handles of the parts of its sparse gradient.
struct KeepsParts : torch::autograd::Function<KeepsParts> {
  static at::Tensor forward(Saved*, const at::Tensor& x) { return x.view_as(x); }
  static Tensors backward(Saved*, const Tensors& gradients) {
    g_memory = memory_of(gradients[0]);
    g_kept = {gradients[0]._indices(), gradients[0]._values()};
    return gradients;
  }
};

at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes).requires_grad_(); }
at::Tensor bag_sum(const at::Tensor& weight) {
  const at::Tensor input = at::tensor({1, 2, 4, 5, 4, 3, 2, 9}, at::kLong);
  const at::Tensor offsets = at::tensor({0, 4}, at::kLong);
  return std::get<0>(at::embedding_bag(weight, input, offsets, false, 1, true)).sum();
}

void set_up(rpc::Agent& agent) { autograd::install(agent); }

}  // namespace

TEST_CASE("a gradient that only the context uses is not copied") {
  Cluster cluster(1, set_up);
  const at::Tensor a = leaf({5, 6}), table = leaf({10, 3});
  {
    autograd::Context context(cluster[0]);
    autograd::backward(context, {PassesOn::apply(a)[1][0]});
    CHECK(memory_of(context.gradient(a)) == g_memory);
  }
  {
    autograd::Context context(cluster[0]);
    const at::Tensor loss = bag_sum(PassesOn::apply(table));
    autograd::backward(context, {loss}, {.retain_graph = true});
    REQUIRE(context.gradient(table).is_sparse());
    CHECK(memory_of(context.gradient(table)) == g_memory);
    const at::Tensor first = context.gradient(table).to_dense();
    for (int i = 0; i < 10; ++i) autograd::backward(context, {loss}, {.retain_graph = true});
    CHECK(at::allclose(context.gradient(table).to_dense(), 11 * first));
  }
}

TEST_CASE("a gradient whose elements share memory is copied for each leaf") {
  Cluster cluster(1, set_up);
  const auto check = [&](const autograd::Context& context, const at::Tensor& x,
                         const at::Tensor& y) {
    CHECK(memory_of(context.gradient(x)) != memory_of(context.gradient(y)));
    CHECK(memory_of(context.gradient(x)) != g_memory);
    CHECK(memory_of(context.gradient(y)) != g_memory);
  };
  {
    const at::Tensor a = leaf({5, 6}), b = leaf({5, 6});
    autograd::Context context(cluster[0]);
    autograd::backward(context, {Expands::apply(PassesOnToTwo::apply(a, b))});
    check(context, a, b);
  }
  {
    const at::Tensor x = leaf({10, 3}), y = leaf({10, 3});
    autograd::Context context(cluster[0]);
    const at::Tensor loss = bag_sum(ExpandsRows::apply(x, y));
    autograd::backward(context, {loss}, {.retain_graph = true});
    check(context, x, y);
    for (int i = 0; i < 10; ++i) autograd::backward(context, {loss}, {.retain_graph = true});
    CHECK(context.gradient(x).coalesce().indices().item<int64_t>() == 1);
    CHECK(at::allclose(context.gradient(x).to_dense(), context.gradient(y).to_dense()));
  }
}

TEST_CASE("a gradient that two leaves share is copied for all of them but one") {
  Cluster cluster(1, set_up);
  const at::Tensor a = leaf({5, 6}), b = leaf({5, 6});
  autograd::Context context(cluster[0]);
  autograd::backward(context, {PassesOnToTwo::apply(a, b)[1][0]});
  const void* const of_a = memory_of(context.gradient(a));
  const void* const of_b = memory_of(context.gradient(b));
  CHECK(of_a != of_b);
  CHECK((of_a == g_memory) != (of_b == g_memory));
}

TEST_CASE("a sparse gradient whose parts are kept elsewhere is copied") {
  Cluster cluster(1, set_up);
  const at::Tensor table = leaf({10, 3});
  autograd::Context context(cluster[0]);
  autograd::backward(context, {bag_sum(KeepsParts::apply(table))});
  const at::Tensor before = context.gradient(table).to_dense();
  REQUIRE(g_kept.size() == 2);
  for (const at::Tensor& part : g_kept) part.zero_();
  CHECK(at::equal(context.gradient(table).to_dense(), before));
  g_kept.clear();
}

TEST_CASE("a caller may overwrite its indices after a pass over a sparse lookup") {
  Cluster cluster(1, set_up);
  const at::Tensor table = leaf({10, 3}), rows = at::tensor({1, 2, 4}, at::kLong);
  autograd::Context context(cluster[0]);
  const at::Tensor looked_up = at::embedding(PassesOn::apply(table), rows, -1, false, true);
  const at::Tensor weights = at::rand({3, 3});
  autograd::backward(context, {(looked_up * weights).sum()});
  CHECK(memory_of(context.gradient(table)) == g_memory);  // the values are not copied
  rows.zero_();
  CHECK(at::equal(context.gradient(table).to_dense()[2], weights[1]));
}

}  // namespace gradient_copies
