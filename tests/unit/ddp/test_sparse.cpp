#include <torch/nn/modules/embedding.h>

#include "unit/ddp/manual_pass.h"
#include "unit/ddp/trainer.h"

using namespace distrain;
using namespace distrain::testing;
using ddp::Reducer;

namespace {

// A table with sparse gradients, and a dense layer.
struct TextNetImpl : torch::nn::Module {
  TextNetImpl() {
    auto options = torch::nn::EmbeddingBagOptions(10, 3).mode(torch::kSum).sparse(true);
    table = register_module("table", torch::nn::EmbeddingBag(options));
    dense = register_module("dense", torch::nn::Linear(3, 2));
    auto generator = at::detail::createCPUGenerator(3);
    const at::NoGradGuard no_grad;
    for (const at::Tensor& p : parameters()) p.copy_(at::randn(p.sizes(), generator));
  }
  at::Tensor forward(const at::Tensor& words) {
    return dense->forward(table->forward(words, at::tensor({0}, at::kLong)));
  }
  torch::nn::EmbeddingBag table{nullptr};
  torch::nn::Linear dense{nullptr};
};
TORCH_MODULE(TextNet);

using SparseNet = ddp::DistributedDataParallel<TextNet>;

// Repeated words on rank 0, none in common with rank 2; rank 1 has some of both.
at::Tensor words_of(int rank, int step) {
  static const std::vector<std::vector<int64_t>> kWords = {{1, 1, 2}, {2, 5, 9}, {5, 5, 7}};
  return (at::tensor(kWords[size_t(rank)], at::kLong) + step) % 10;
}
at::Tensor squares(const at::Tensor& output) { return output.pow(2).sum(); }

Values sparse_reference(int size, int steps) {
  TextNet net;
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < size; ++rank) {
      (squares(net->forward(words_of(rank, step))) / size).backward();
    }
  }
  Values all;
  for (const at::Tensor& p : net->parameters()) all.push_back(p.grad().to_dense());
  return all;
}

}  // namespace

TEST_CASE("sparse gradients are averaged by rows, in plain passes and in contexts") {
  const int size = GENERATE(1, 2, 3);
  TestGroup group(size, {.timeout = std::chrono::seconds(60)});
  Values tables(static_cast<size_t>(size));
  run_ranks(size, [&](int rank) {
    SparseNet net(TextNet(), group.backends[size_t(rank)], kSmallBuckets);
    const auto check = [&](const auto& gradient_of, const Values& wanted) {
      const auto parameters = net.parameters();
      for (size_t i = 0; i < wanted.size(); ++i) {
        const at::Tensor gradient = gradient_of(parameters[i]);
        RANK_CHECK(gradient.is_sparse() == (i == 0));
        RANK_CHECK(at::allclose(gradient.to_dense(), wanted[i], 1e-5, 1e-6));
      }
    };
    const auto of_grad = [](const at::Tensor& p) { return p.grad(); };
    // Passes add up, as without a Reducer, also after one in no_sync().
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        const auto local = net.no_sync();
        squares(net.forward(words_of(rank, step))).backward();
        continue;
      }
      squares(net.forward(words_of(rank, step))).backward();
      check(of_grad, sparse_reference(size, step + 1));
    }
    tables[size_t(rank)] = net.module()->table->weight.grad();
    RANK_CHECK(tables[size_t(rank)].is_coalesced());
    ManualPass pass(net.reducer());
    pass.backward(squares(net.module()->forward(words_of(rank, 0))), net.parameters());
    check([&](const at::Tensor& p) { return pass.gradient(p); }, sparse_reference(size, 1));
  });
  for (const at::Tensor& table : tables) {
    CHECK(at::equal(table.indices(), tables[0].indices()));
    CHECK(same_bits(table.values(), tables[0].values()));
  }
}

TEST_CASE("a rank may have no rows, and a sparse parameter may be unused") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    const auto table = at::ones({10, 3}).set_requires_grad(true);
    const auto dense = at::ones({3}).set_requires_grad(true);
    Reducer reducer({{"table", table, /*has_sparse_gradient=*/true}, {"dense", dense}},
                    group.backends[size_t(rank)], {.find_unused_parameters = true});
    const auto rows = [&](const at::Tensor& ids) {
      return at::embedding(table, ids, -1, false, /*sparse=*/true);
    };
    for (int round = 0; round < 2; ++round) {
      table.mutable_grad() = at::Tensor();
      const at::Tensor ids = rank == 0 ? at::tensor({4, 4}, at::kLong) : at::empty({0}, at::kLong);
      (rows(ids).sum() + dense.sum()).backward();
      RANK_CHECK(table.grad().is_sparse() && table.grad()._nnz() == 1);
      RANK_CHECK(at::equal(table.grad().to_dense()[4], at::full({3}, 1.)));
      // Rank 0 alone uses the table, then no rank does.
      (rank == 0 ? rows(at::tensor({2}, at::kLong)).sum() + dense.sum() : dense.sum()).backward();
      RANK_CHECK(at::equal(table.grad().to_dense()[2], at::full({3}, 0.5)));
      const at::Tensor before = table.grad().to_dense().clone();
      dense.sum().backward();
      RANK_CHECK(at::equal(table.grad().to_dense(), before));
      table.mutable_grad() = at::Tensor();
      dense.sum().backward();
      RANK_CHECK(!table.grad().defined());
    }
  });
}

TEST_CASE("sparse gradients of a model with a static graph and a hook are averaged as they are") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    SparseNet net(TextNet(), group.backends[size_t(rank)],
                  {.static_graph = true, .hook = ddp::compress_hook(at::kBFloat16)});
    for (int round = 0; round < 2; ++round) {
      net.module()->zero_grad();
      squares(net.forward(words_of(rank, 0))).backward();
      RANK_CHECK(
          at::allclose(net.module()->table->weight.grad().to_dense(), sparse_reference(2, 1)[0]));
    }
  });
}

TEST_CASE("a dense gradient of a parameter with sparse ones is refused on all ranks") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    SparseNet net(TextNet(), group.backends[size_t(rank)]);
    const auto pass = [&](bool is_dense) {
      net.module()->zero_grad();
      const at::Tensor output = net.forward(words_of(rank, 0)).sum();
      (is_dense ? output + net.module()->table->weight.sum() : output).backward();
    };
    pass(false);
    const base::Error error = thrown_by([&] { pass(rank == 1); });
    RANK_CHECK(error.kind == ErrorKind::kInvalid && error.rank == 1);
    RANK_CHECK(contains(error.message, "'table.weight' got a gradient that is not sparse"));
    pass(false);
  });
}
