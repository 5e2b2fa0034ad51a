#include <ATen/Functions.h>

#include "distrain/nn/random.h"
#include "support/catch.h"

using namespace distrain;
using nn::Dropout;

TEST_CASE("equal keys give equal series of masks, different keys different ones") {
  const at::Tensor x = at::ones({40, 50});
  Dropout first({7, 1, 2}), again({7, 1, 2}), other({7, 2, 1});
  const at::Tensor a = first(x, 0.5), b = first(x, 0.5);
  CHECK(at::equal(a, again(x, 0.5)));
  CHECK(at::equal(b, again(x, 0.5)));
  CHECK_FALSE(at::equal(a, b));
  CHECK_FALSE(at::equal(a, other(x, 0.5)));
}

TEST_CASE("dropout does not use torch's generator") {
  at::manual_seed(3);
  const at::Tensor expected = at::rand({4});
  at::manual_seed(3);
  Dropout({1})(at::ones({100}), 0.5);
  CHECK(at::equal(at::rand({4}), expected));
}

TEST_CASE("elements are kept with probability 1 - p and scaled to keep the mean") {
  const double p = GENERATE(0.1, 0.25, 0.5, 0.9);
  CAPTURE(p);
  const at::Tensor x = at::rand({400, 500}) + 1;
  const at::Tensor y = Dropout({5})(x, p);
  const at::Tensor kept = y.ne(0);
  CHECK(kept.to(at::kDouble).mean().item<double>() == Approx(1 - p).margin(0.01));
  CHECK(at::allclose(y, x * kept / (1 - p)));
}

TEST_CASE("channels are kept or dropped as a whole") {
  const at::Tensor x = at::rand({60, 50, 3, 4}) + 1;
  const at::Tensor y = Dropout({5}).channels(x, 0.25);
  const at::Tensor kept = y.ne(0).sum({2, 3});
  CHECK(at::logical_or(kept.eq(0), kept.eq(12)).all().item<bool>());
  CHECK(kept.ne(0).to(at::kDouble).mean().item<double>() == Approx(0.75).margin(0.03));
  CHECK(at::allclose(y, x * y.ne(0) / 0.75));
}

TEST_CASE("dropout that is disabled or has probability 0 returns its argument") {
  const at::Tensor x = at::rand({2, 3, 4, 5});
  Dropout off;
  CHECK(off(x, 0.5).is_same(x));
  CHECK(off.channels(x, 0.5).is_same(x));
  Dropout on({1});
  CHECK(on(x, 0).is_same(x));
}

TEST_CASE("dropout with probability 1 gives zeros, and zero gradients") {
  const at::Tensor x = at::rand({2, 3, 4, 5}).requires_grad_();
  Dropout drop({1});
  const at::Tensor y = drop(x, 1), z = drop.channels(x, 1);
  CHECK(y.eq(0).all().item<bool>());
  CHECK(z.eq(0).all().item<bool>());
  (y + z).sum().backward();
  CHECK(x.grad().eq(0).all().item<bool>());
}

TEST_CASE("the gradient is masked as the values were") {
  const at::Tensor x = at::rand({30, 40}).add_(1).requires_grad_();
  const at::Tensor y = Dropout({9})(x, 0.5);
  y.sum().backward();
  CHECK(at::equal(x.grad(), y.detach().ne(0) * 2.0));
}
