#include <torch/nn/utils/clip_grad.h>

#include "unit/ddp/manual_pass.h"
#include "unit/ddp/trainer.h"

using namespace distrain;
using namespace distrain::testing;
using ddp::Reducer;

namespace {

// Two parameters in one bucket, after a first pass, and the gradients' inputs by rank.
struct Pair {
  explicit Pair(const BackendPtr& backend, Reducer::Options options = {})
      : reducer({{"a", a}, {"b", b}}, backend, std::move(options)) {}
  void backward(double factor) const { (a.sum() * factor + b.sum() * (2 * factor)).backward(); }
  bool has(double of_a) const {
    return at::equal(a.grad(), at::full({3}, of_a)) &&
           at::equal(b.grad(), at::full({2, 2}, 2 * of_a));
  }
  bool shares_memory() const { return a.grad().storage().is_alias_of(b.grad().storage()); }

  const at::Tensor a = at::zeros({3}).set_requires_grad(true);
  const at::Tensor b = at::zeros({2, 2}).set_requires_grad(true);
  Reducer reducer;
};

}  // namespace

TEST_CASE("gradients of plain passes are views of their bucket, which later passes add to") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    const Pair net(group.backends[size_t(rank)]);
    net.backward(1 + 2 * rank);  // the mean of 1 and 3
    RANK_CHECK(net.shares_memory() && net.has(2));
    const void* const memory = net.a.grad().data_ptr();
    for (int step = 1; step < 4; ++step) {
      net.backward(1 + 2 * rank);
      RANK_CHECK(net.has(2 + 2 * step) && net.a.grad().data_ptr() == memory);
    }
    for (const at::Tensor& p : {net.a, net.b}) p.mutable_grad().zero_();
    net.backward(rank);
    RANK_CHECK(net.has(0.5) && net.a.grad().data_ptr() == memory);
    for (const at::Tensor& p : {net.a, net.b}) p.mutable_grad().detach_().zero_();
    net.backward(rank);
    RANK_CHECK(net.has(0.5) && net.a.grad().data_ptr() == memory);
    // The memory is used again if nobody keeps a gradient.
    for (const at::Tensor& p : {net.a, net.b}) p.mutable_grad() = at::Tensor();
    net.backward(rank);
    RANK_CHECK(net.has(0.5) && net.a.grad().data_ptr() == memory);
    torch::nn::utils::clip_grad_norm_({net.a, net.b}, 1);
    const double clipped = net.a.grad()[0].item<double>();
    RANK_CHECK(clipped < 0.5);
    net.backward(2);
    RANK_CHECK(at::allclose(net.b.grad(), at::full({2, 2}, 2 * clipped + 4)));
  });
}

TEST_CASE("a gradient that the user keeps, replaces or sets to none is as without a Reducer") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    const Pair net(group.backends[size_t(rank)]);
    net.backward(1);
    const at::Tensor kept = net.a.grad(), alias = net.b.grad().detach();
    for (const at::Tensor& p : {net.a, net.b}) p.mutable_grad() = at::Tensor();
    net.backward(5);
    RANK_CHECK(net.has(5) && net.shares_memory());
    RANK_CHECK(at::equal(kept, at::full({3}, 1.)) && at::equal(alias, at::full({2, 2}, 2.)));
    net.a.mutable_grad() = at::full({3}, 7. + rank);  // replaced on each rank, and b's adds up
    net.backward(1);
    RANK_CHECK(at::equal(net.a.grad(), at::full({3}, 8.5)));
    RANK_CHECK(at::equal(net.b.grad(), at::full({2, 2}, 12.)) && net.shares_memory());
    net.a.mutable_grad() = at::Tensor();
    net.backward(1);
    RANK_CHECK(at::equal(net.a.grad(), at::full({3}, 1.)));
    RANK_CHECK(at::equal(net.b.grad(), at::full({2, 2}, 14.)));
  });
}

TEST_CASE("a context's pass leaves .grad in its bucket alone") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    Pair net(group.backends[size_t(rank)]);
    net.backward(rank);
    ManualPass pass(net.reducer);
    pass.backward(net.a.sum() * 10 + net.b.sum() * 20, {net.a, net.b});
    RANK_CHECK(at::equal(pass.gradient(net.a), at::full({3}, 10.)));
    RANK_CHECK(net.has(0.5));
    net.backward(rank);
    RANK_CHECK(net.has(1));
    RANK_CHECK(at::equal(pass.gradient(net.b), at::full({2, 2}, 20.)));
  });
}

TEST_CASE("a gradient keeps its bits if no rank uses its parameter") {
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    Pair net(group.backends[size_t(rank)], {.find_unused_parameters = true});
    net.backward(0.1);
    const at::Tensor before = net.b.grad().clone();
    for (int step = 0; step < 3; ++step) {
      net.a.sum().backward();
      RANK_CHECK(same_bits(net.b.grad(), before));
    }
    (rank == 1 ? net.a.sum() + net.b.sum() * 3 : net.a.sum()).backward();
    RANK_CHECK(at::allclose(net.b.grad(), before + 1) && net.shares_memory());
  });
}

TEST_CASE("after a failed plain pass no gradient is in memory that a collective may still use") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    const Pair net(group.backends[size_t(rank)], {.bucket_cap_bytes = 1, .first_bucket_bytes = 1});
    net.backward(1);
    net.backward(1);
    // Rank 1 leaves out `a`, whose bucket comes last.
    if (rank == 0) {
      thrown_by([&] { net.backward(1); });
    } else {
      thrown_by([&] { net.b.sum().backward(); });
    }
    RANK_CHECK(!net.a.grad().defined() && !net.b.grad().defined());
    net.backward(1);
    RANK_CHECK(net.has(1));
  });
}
