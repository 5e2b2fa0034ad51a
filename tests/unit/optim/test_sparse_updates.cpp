#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "distrain/optim/update_rule.h"
#include "invalid_message.h"
#include "sparse_gradients.h"
#include "support/catch.h"

namespace distrain::optim {
namespace {

// Applies the same gradients sparse and dense; the results must be equal. The kernels of rows
// update a contiguous parameter.
void compare_sparse(const OptimizerOptions& options, int64_t rows = 10, bool is_contiguous = true) {
  at::manual_seed(4);
  at::Tensor by_rows = is_contiguous ? at::randn({rows, 4}) : at::randn({4, rows}).t();
  at::Tensor whole = by_rows.clone();
  const auto sparse_rule = std::make_unique<UpdateRule>(options);
  const auto dense_rule = std::make_unique<UpdateRule>(options);
  for (int step = 0; step < kSteps; ++step) {
    SparsePair pair = random_rows(rows, 4, rows - 2);
    if (step % 2 == 1) pair.sparse_gradient = pair.sparse_gradient.coalesce();
    sparse_rule->apply(0, by_rows, pair.sparse_gradient);
    dense_rule->apply(0, whole, pair.dense_gradient);
    REQUIRE(difference(by_rows, whole) <= 1e-6);
  }
}

}  // namespace

TEST_CASE("Sparse SGD and Adagrad equal the dense rules with the same gradient") {
  compare_sparse(Sgd{0.1});
  compare_sparse(Adagrad{0.05});
  compare_sparse(Adagrad{0.05, 0.1, 0, 0.2, 1e-6});
  compare_sparse(Adagrad{0.05}, 5000);  // enough rows for several threads
  compare_sparse(Sgd{0.1}, 10, false);
  compare_sparse(Adagrad{0.05, 0.1, 0, 0.2, 1e-6}, 10, false);
}

TEST_CASE("Every rule updates rows in copies as the kernels do") {
  const OptimizerOptions options =
      GENERATE(OptimizerOptions(Sgd{0.1}), OptimizerOptions(Adagrad{0.05, 0.1, 0, 0.2, 1e-6}),
               OptimizerOptions(Adam{0.01, 0.8, 0.95, 1e-3}),
               OptimizerOptions(AdamW{0.01, 0.8, 0.95, 1e-3, 0.1}),
               OptimizerOptions(RmsProp{0.01, 0.9, 1e-6}));
  at::manual_seed(7);
  at::Tensor contiguous = at::randn({10, 4}, at::kDouble);
  at::Tensor transposed = contiguous.t().contiguous().t();
  const auto kernels = std::make_unique<UpdateRule>(options),
             copies = std::make_unique<UpdateRule>(options);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor gradient = random_rows(10, 4, 5, at::kDouble).sparse_gradient;
    kernels->apply(0, contiguous, gradient, 0.5);
    copies->apply(0, transposed, gradient, 0.5);
    REQUIRE(difference(contiguous, transposed) <= 1e-12);
  }
  for (const auto& [name, value] : kernels->state(0)) {
    CHECK(difference(value, copies->state(0).at(name)) <= 1e-12);
  }
}

TEST_CASE("Sparse Adam equals SparseAdam") {
  at::manual_seed(5);
  const Adam options{0.01, 0.8, 0.95, 1e-6};
  const auto rule = std::make_unique<UpdateRule>(options);
  at::Tensor parameter = at::randn({6, 3}, at::kDouble);
  const at::Tensor start = parameter.clone();
  at::Tensor expected = parameter.clone();
  auto value = expected.accessor<double, 2>();
  std::vector<std::vector<double>> first(6, std::vector<double>(3)), second = first;
  for (int step = 1; step <= kSteps; ++step) {
    const SparsePair pair = random_rows(5, 3, 4, at::kDouble);  // row 5 is never used
    const at::Tensor rows = pair.sparse_gradient.coalesce().indices()[0];
    const auto gradient = pair.dense_gradient.accessor<double, 2>();
    rule->apply(0, parameter,
                sparse(std::vector<int64_t>(rows.data_ptr<int64_t>(),
                                            rows.data_ptr<int64_t>() + rows.numel()),
                       pair.sparse_gradient.coalesce().values(), {6, 3}));
    for (int64_t k = 0; k < rows.numel(); ++k) {
      const int64_t r = rows[k].item<int64_t>();
      for (int64_t c = 0; c < 3; ++c) {
        const double g = gradient[r][c];
        double& m = first[static_cast<size_t>(r)][static_cast<size_t>(c)];
        double& v = second[static_cast<size_t>(r)][static_cast<size_t>(c)];
        m += (1 - options.beta1) * (g - m);
        v += (1 - options.beta2) * (g * g - v);
        const double size = options.lr * std::sqrt(1 - std::pow(options.beta2, step)) /
                            (1 - std::pow(options.beta1, step));
        value[r][c] -= size * m / (std::sqrt(v) + options.eps);
      }
    }
    REQUIRE(difference(parameter, expected) <= 1e-12);
  }
  CHECK(difference(parameter[5], start[5]) == 0);
}

TEST_CASE("A sparse gradient changes only its rows") {
  const OptimizerOptions options = GENERATE(
      OptimizerOptions(Sgd{0.1}), OptimizerOptions(Adagrad{0.1}), OptimizerOptions(Adam{0.1}));
  const auto rule = std::make_unique<UpdateRule>(options);
  at::Tensor parameter = at::randn({8, 2});
  // Infinity becomes NaN if a rule multiplies an unused row by 0, as a mask would.
  parameter[7].fill_(std::numeric_limits<float>::infinity());
  const at::Tensor before = parameter.clone();
  rule->apply(0, parameter, sparse({1, 3, 1}, at::ones({3, 2}), {8, 2}));
  for (const int64_t row : {0, 2, 4, 5, 6, 7}) CHECK(at::equal(parameter[row], before[row]));
  for (const int64_t row : {1, 3}) CHECK_FALSE(at::equal(parameter[row], before[row]));
}

TEST_CASE("A sparse gradient without rows counts as a step, as in torch, and changes nothing") {
  const OptimizerOptions options = GENERATE(
      OptimizerOptions(Sgd{0.1}), OptimizerOptions(Adagrad{0.1, 0.5}), OptimizerOptions(Adam{0.1}));
  const auto rule = std::make_unique<UpdateRule>(options);
  at::Tensor parameter = at::randn({4, 2});
  const at::Tensor before = parameter.clone();
  rule->apply(0, parameter, sparse({}, at::empty({0, 2}), {4, 2}));
  CHECK(at::equal(parameter, before));
  CHECK(rule->step_count(0) == 1);
  // The state after this step can be loaded.
  std::make_unique<UpdateRule>(options)->load(0, parameter, rule->state(0));
  rule->apply(0, parameter, sparse({0}, at::ones({1, 2}), {4, 2}));
  CHECK(rule->step_count(0) == 2);
}

TEST_CASE("A parameter of one or three dimensions may have row-sparse gradients") {
  const auto rule = std::make_unique<UpdateRule>(Adagrad{0.1});
  at::Tensor vector = at::zeros({5});
  rule->apply(0, vector, sparse({4, 4}, at::ones({2}), {5}));
  CHECK(vector[4].item<float>() == Approx(-0.1));
  at::Tensor cube = at::zeros({3, 2, 2});
  rule->apply(1, cube, sparse({2}, at::ones({1, 2, 2}), {3, 2, 2}));
  CHECK(cube.sum().item<float>() == Approx(-0.4));
}

TEST_CASE("Dense and sparse gradients may alternate") {
  at::manual_seed(6);
  const auto mixed = std::make_unique<UpdateRule>(Adagrad{0.1});
  const auto dense = std::make_unique<UpdateRule>(Adagrad{0.1});
  at::Tensor a = at::randn({5, 2});
  at::Tensor b = a.clone();
  for (int step = 0; step < 6; ++step) {
    const SparsePair pair = random_rows(5, 2, 3);
    mixed->apply(0, a, step % 2 == 0 ? pair.sparse_gradient : pair.dense_gradient);
    dense->apply(0, b, pair.dense_gradient);
  }
  CHECK(difference(a, b) <= 1e-6);
}

TEST_CASE("Options without a meaning for sparse gradients are refused") {
  const auto message = [](const OptimizerOptions& options) {
    const auto rule = std::make_unique<UpdateRule>(options);
    at::Tensor parameter = at::ones({3, 2});
    return invalid_message([&] {
      rule->apply(0, parameter, sparse({0}, at::ones({1, 2}), {3, 2}));
    });
  };
  CHECK(message(Sgd{0.1, 0.9}) == "sgd with momentum cannot take sparse gradients");
  CHECK(message(Sgd{0.1, 0, 0.1}) == "sgd with weight_decay cannot take sparse gradients");
  CHECK(message(Adagrad{0.1, 0, 0.1}) == "adagrad with weight_decay cannot take sparse gradients");
  CHECK(message(Adam{0.1, 0.9, 0.999, 1e-8, 0.1}) ==
        "adam with weight_decay cannot take sparse gradients");
  CHECK(message(Adam{0.1, 0.9, 0.999, 1e-8, 0, true}) ==
        "adam with amsgrad cannot take sparse gradients");
  CHECK(message(AdamW{.amsgrad = true}) == "adamw with amsgrad cannot take sparse gradients");
  CHECK(message(RmsProp{.momentum = 0.9}) ==
        "rmsprop with weight_decay, momentum or centered cannot take sparse gradients");
  CHECK(message(Adadelta{}) == "adadelta cannot take sparse gradients");
  CHECK(message(Adamax{}) == "adamax cannot take sparse gradients");
  CHECK(message(Rprop{}) == "rprop cannot take sparse gradients");
}

}  // namespace distrain::optim
