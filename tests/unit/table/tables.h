// Ranks with tables, and a table in one tensor to compare with.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <future>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/single_process_optimizer.h"
#include "distrain/table/sharded_embedding.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing {

using table::ShardedEmbedding;
using table::TableOptions;
using Mode = optim::Sharing::Mode;

inline const at::Tensor kIds = at::arange(1, 5);

inline void set_up_tables(rpc::Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
  table::install(agent);
}

inline TableOptions table_of(const std::string& name, int64_t dim = 4,
                             optim::OptimizerFields optimizer = {"sgd", {{"lr", 1}}}) {
  return {.name = name, .dim = dim, .num_rows = 50, .seed = 3, .optimizer = std::move(optimizer)};
}

/// Returns the result of `f`, which runs on another thread. Ends the process if `f` does not
/// return, because its thread could not be joined.
template <class F>
auto in_time(F f) {
  auto result = std::async(std::launch::async, std::move(f));
  if (result.wait_for(std::chrono::seconds(60)) == std::future_status::timeout) {
    std::fputs("a wait has not ended within 60 s\n", stderr);
    std::abort();
  }
  return result.get();
}

/// Returns the rows of `ids` in an evaluation.
inline at::Tensor rows_of(ShardedEmbedding& tables, const at::Tensor& ids, int table = 0) {
  const at::NoGradGuard no_grad;
  return tables.look_up({{table, ids}})[0];
}
inline at::Tensor all_rows(ShardedEmbedding& tables, int table = 0) {
  return rows_of(tables, at::arange(50), table);
}

inline bool is_close(const at::Tensor& a, const at::Tensor& b, double tolerance = 1e-6) {
  return a.sizes() == b.sizes() &&
         at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance);
}

/// A table of 50 rows in one tensor, with an optimizer that updates only rows with a gradient.
struct WholeTable {
  explicit WholeTable(const at::Tensor& initial)
      : weight(initial.to(at::kDouble).detach().clone().requires_grad_()),
        first(at::zeros_like(weight)),
        second(at::zeros_like(weight)) {}

  at::Tensor bags(const at::Tensor& ids, const at::Tensor& offsets, const at::Tensor& weights = {},
                  bool mean = false) const {
    return std::get<0>(at::embedding_bag(weight, ids, offsets, false, mean ? 1 : 0, false,
                                         weights.defined() ? std::optional(weights) : std::nullopt,
                                         false));
  }

  /// Makes a step with the gradient `weight.grad() * scale`.
  void step(const optim::OptimizerFields& options, double scale = 1) {
    const at::NoGradGuard no_grad;
    const auto get = [&](const char* name, double otherwise) {
      const auto it = options.values.find(name);
      return it == options.values.end() ? otherwise : it->second;
    };
    const double lr = get("lr", 0);
    const at::Tensor g = weight.grad() * scale;
    const at::Tensor has_gradient = touched.unsqueeze(1);
    const auto set = [&](at::Tensor& state, const at::Tensor& value) {
      state.copy_(at::where(has_gradient, value, state));
    };
    ++steps;
    at::Tensor w = weight.detach();
    at::Tensor change;
    if (options.name == "sgd") {
      change = lr * g;
    } else if (options.name == "adagrad") {
      set(first, first + g * g);
      change = lr / (1 + static_cast<double>(steps - 1) * get("lr_decay", 0)) * g /
               (first.sqrt() + 1e-10);
    } else if (options.name == "rowwise-adagrad") {
      set(first, first + (g * g).mean(1, true));
      change = lr * g / (first.sqrt() + 1e-10);
    } else if (options.name == "rmsprop") {
      set(first, 0.99 * first + 0.01 * g * g);
      change = lr * g / (first.sqrt() + 1e-8);
    } else {
      if (options.name == "adamw") w = w * (1 - lr * get("weight_decay", 0.01));
      set(first, 0.9 * first + 0.1 * g);
      set(second, 0.999 * second + 0.001 * g * g);
      const auto n = static_cast<double>(steps);
      const double rate = lr * std::sqrt(1 - std::pow(0.999, n)) / (1 - std::pow(0.9, n));
      change = rate * first / (second.sqrt() + 1e-8);
    }
    weight.copy_(at::where(has_gradient, w - change, weight));
    weight.mutable_grad() = at::Tensor();
    touched = at::zeros({50}, at::kBool);
  }
  /// Notes that the next step has gradients of these rows, which may be zero.
  void touch(const at::Tensor& ids) { touched.index_fill_(0, ids, true); }

  at::Tensor weight, first, second;
  at::Tensor touched = at::zeros({50}, at::kBool);
  int64_t steps = 0;
};

}  // namespace distrain::testing
