#include "query_plan.h"

#include <algorithm>
#include <numeric>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace distrain::table {

namespace {

template <class T>
at::Tensor tensor_of(std::vector<T> values, at::ScalarType type) {
  const auto kept = std::make_shared<std::vector<T>>(std::move(values));
  return at::from_blob(
      kept->data(), {std::ssize(*kept)}, [kept](void*) {}, at::dtype(type));
}

[[noreturn]] void refuse(const TableOptions& table, const std::string& why) {
  base::invalid("a lookup in table " + table.name + ": " + why);
}

at::Tensor flat_ids(const Query& query, const TableOptions& table) {
  if (!query.ids.defined() || !at::isIntegralType(query.ids.scalar_type(), false)) {
    refuse(table, "the ids are not integers");
  }
  const at::Tensor ids = query.ids.to(at::kCPU, at::kLong).flatten().contiguous();
  if (table.num_rows == 0) return ids;
  for (const int64_t id : span_of<int64_t>(ids)) {
    if (id >= 0 && id < table.num_rows) continue;
    refuse(table, fmt::format("the id {} is not one of 0 to {}", id, table.num_rows - 1));
  }
  return ids;
}

// Returns the offsets with the number of ids at the end, or undefined if the query is not pooled.
at::Tensor all_offsets(const Query& query, const TableOptions& table, int64_t ids) {
  if (query.pooling == Pooling::kNone) {
    if (query.offsets.defined() || query.weights.defined()) {
      refuse(table, "offsets or weights without pooling");
    }
    return {};
  }
  if (!query.offsets.defined() || query.offsets.dim() != 1 || query.ids.dim() != 1) {
    refuse(table, "bags need ids and offsets of one dimension");
  }
  const at::Tensor starts = query.offsets.to(at::kCPU, at::kLong).contiguous();
  std::vector<int64_t> offsets(starts.const_data_ptr<int64_t>(),
                               starts.const_data_ptr<int64_t>() + starts.numel());
  offsets.push_back(ids);
  if (offsets.front() != 0 || !std::ranges::is_sorted(offsets)) {
    refuse(table, "the offsets do not ascend from 0 to the number of ids");
  }
  if (query.weights.defined() &&
      (query.pooling == Pooling::kMean || query.weights.dim() != 1 ||
       query.weights.numel() != ids || query.weights.scalar_type() != at::kFloat ||
       !query.weights.is_cpu())) {
    refuse(table, "weights must be a float for each id, and need sums");
  }
  if (query.weights.defined() && !at::isfinite(query.weights).all().item<bool>()) {
    throw base::Exception(base::ErrorKind::kNotFinite,
                          "a weight of a lookup in table " + table.name + " is not finite");
  }
  return tensor_of(std::move(offsets), at::kLong);
}

size_t server_of(uint64_t hash, size_t servers) { return servers == 1 ? 0 : hash % servers; }

// Lets the servers pool the bags: each gets the positions whose ids it holds.
void divide_bags(QueryPlan& plan, std::span<const uint64_t> ids, std::span<const int64_t> offsets,
                 const at::Tensor& weights) {
  struct Bags {
    std::vector<int64_t> ids, offsets{0};
    std::vector<float> weights;
  };
  std::vector<Bags> bags(plan.parts.size());
  const auto factors = span_of<float>(weights);
  for (size_t bag = 0; bag + 1 < offsets.size(); ++bag) {
    for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
      const auto p = static_cast<size_t>(i);
      Bags& its = bags[server_of(rows::hash_of_id(ids[p]), bags.size())];
      its.ids.push_back(static_cast<int64_t>(ids[p]));
      if (!factors.empty()) its.weights.push_back(factors[p]);
    }
    for (Bags& each : bags) each.offsets.push_back(std::ssize(each.ids));
  }
  for (size_t server = 0; server < bags.size(); ++server) {
    LookupPart& part = plan.parts[server];
    part.ids = tensor_of(std::move(bags[server].ids), at::kLong);
    part.offsets = tensor_of(std::move(bags[server].offsets), at::kLong);
    if (!factors.empty()) part.weights = tensor_of(std::move(bags[server].weights), at::kFloat);
  }
}

// Asks each server for its distinct ids, in the order of their hashes.
void divide_ids(QueryPlan& plan) {
  GatherPlan& gather = *plan.gather;
  const auto hashes = gather.groups.hashes();
  std::vector<std::vector<int64_t>> by_server(plan.parts.size());
  for (size_t i = 0; i < hashes.size(); ++i) {
    by_server[server_of(hashes[i], by_server.size())].push_back(
        static_cast<int64_t>(gather.groups.ids()[i]));
  }
  std::vector<uint32_t> next(by_server.size());  // the next vector of each server
  for (size_t server = 0; server < by_server.size(); ++server) {
    if (server > 0) {
      next[server] = next[server - 1] + static_cast<uint32_t>(plan.parts[server - 1].ids.numel());
    }
    plan.parts[server].ids = tensor_of(std::move(by_server[server]), at::kLong);
  }
  for (const uint64_t hash : hashes) gather.leaf_of.push_back(next[server_of(hash, next.size())]++);
  gather.row_of = gather.groups.inverse();
  for (uint32_t& row : gather.row_of) row = gather.leaf_of[row];
}

rows::Bags<float> bags_of(const GatherPlan& gather, const at::Tensor& weights) {
  return {span_of<int64_t>(gather.offsets), span_of<float>(weights), gather.is_mean};
}

// Adds `factor` times `from` to `to`. Blocks of constant length are vectorized.
void add_scaled(float* to, const float* from, float factor, size_t dim) {
  constexpr size_t kBlock = 8;
  size_t at = 0;
  for (; at + kBlock <= dim; at += kBlock) {
    for (size_t i = 0; i < kBlock; ++i) to[at + i] += factor * from[at + i];
  }
  for (; at < dim; ++at) to[at] += factor * from[at];
}

/// The backward function of a lookup that is pooled on this rank.
struct GatherBackward final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    torch::autograd::variable_list result(2);
    if (!grads[0].defined()) return result;
    const at::NoGradGuard no_grad;
    const at::Tensor grad = grads[0].contiguous();
    const rows::BagGradients<float> bags(bags_of(*gather, weights));
    if (task_should_compute_output(0)) result[0] = of_leaf(grad, bags);
    if (task_should_compute_output(1)) result[1] = of_weights(grad, bags);
    return result;
  }
  std::string name() const override { return "distrain::GatherBackward"; }

  at::Tensor of_leaf(const at::Tensor& grad, const rows::BagGradients<float>& bags) const {
    constexpr int64_t kRowsPerTask = 1024;
    const auto dim = static_cast<size_t>(grad.size(1));
    at::Tensor sums = at::empty(leaf.sizes(), at::kFloat);
    at::parallel_for(0, sums.size(0), kRowsPerTask, [&](int64_t first, int64_t last) {
      for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
        float* const to = sums.mutable_data_ptr<float>() + gather->leaf_of[i] * dim;
        std::fill_n(to, dim, 0.0F);  // here and not at once, so that the row is in the cache
        for (const uint32_t p : gather->groups.positions_of(i)) {
          add_scaled(to, grad.const_data_ptr<float>() + bags.rows[p] * dim,
                     bags.factors.empty() ? 1 : bags.factors[p], dim);
        }
      }
    });
    return sums;
  }

  at::Tensor of_weights(const at::Tensor& grad, const rows::BagGradients<float>& bags) const {
    const auto dim = static_cast<size_t>(grad.size(1));
    at::Tensor result = at::empty({std::ssize(gather->row_of)}, at::kFloat);
    for (size_t p = 0; p < gather->row_of.size(); ++p) {
      const float* const a = grad.const_data_ptr<float>() + bags.rows[p] * dim;
      const float* const b = leaf.const_data_ptr<float>() + gather->row_of[p] * dim;
      result.mutable_data_ptr<float>()[p] = std::inner_product(a, a + dim, b, 0.0F);
    }
    return result;
  }

  std::shared_ptr<const GatherPlan> gather;
  at::Tensor leaf, weights;  // detached: their values in the forward pass
};

}  // namespace

QueryPlan plan_query(const Query& query, const TableOptions& table, size_t servers,
                     size_t bytes_of_number) {
  const at::Tensor ids_tensor = flat_ids(query, table);
  const auto ids = span_of<uint64_t>(ids_tensor);
  at::Tensor offsets = all_offsets(query, table, ids_tensor.numel());
  QueryPlan plan;
  plan.parts.resize(servers);
  for (LookupPart& part : plan.parts) part.table = query.table;
  plan.shape = query.ids.sizes().vec();
  if (offsets.defined()) plan.shape = {offsets.numel() - 1};
  plan.shape.push_back(table.dim);

  plan.gather = std::make_shared<GatherPlan>();
  plan.gather->groups.assign(ids);
  const bool weights_learn = query.weights.defined() && query.weights.requires_grad();
  if (offsets.defined() && bytes_of_number > 0 && !weights_learn) {
    // A vector travels twice, as a row and as a gradient.
    const size_t vector = 2 * bytes_of_number * static_cast<size_t>(table.dim) + sizeof(int64_t);
    const auto bags = static_cast<size_t>(offsets.numel() - 1);
    if (bags * servers * vector + ids.size() * sizeof(int64_t) <
        plan.gather->groups.size() * vector) {
      plan.gather.reset();
      divide_bags(plan, ids, span_of<int64_t>(offsets),
                  query.weights.defined() ? query.weights.contiguous() : at::Tensor());
      if (query.pooling == Pooling::kMean) {
        const at::Tensor counts = offsets.diff().clamp_min(1);
        plan.share = counts.to(at::kFloat).reciprocal().unsqueeze(1);
      }
      return plan;
    }
  }
  plan.gather->offsets = offsets.defined() ? offsets : at::arange(ids_tensor.numel() + 1);
  plan.gather->is_mean = query.pooling == Pooling::kMean;
  plan.weights = query.weights;
  divide_ids(plan);
  return plan;
}

at::Tensor result_of(const QueryPlan& plan) {
  if (!plan.gather) {
    const int64_t servers = std::ssize(plan.parts);
    const at::Tensor& leaf = plan.leaf;
    // A copy, because a caller may write to the result.
    at::Tensor sum = servers == 1 ? leaf.clone() : leaf.view({servers, -1, leaf.size(1)}).sum(0);
    if (plan.share.defined()) sum = sum * plan.share;
    return sum.view(plan.shape);
  }
  // A copy of the weights, because the caller may change them before the backward pass.
  const at::Tensor weights = plan.weights.defined() ? plan.weights.detach().clone() : at::Tensor();
  const at::Tensor result =
      pool(plan.leaf.detach(), plan.gather->row_of, bags_of(*plan.gather, weights));
  if (torch::autograd::compute_requires_grad(plan.leaf, plan.weights)) {
    const auto node = std::make_shared<GatherBackward>();
    node->gather = plan.gather;
    node->leaf = plan.leaf.detach();
    node->weights = weights;
    node->set_next_edges(torch::autograd::collect_next_edges(plan.leaf, plan.weights));
    torch::autograd::set_history(result, node);
  }
  return result.view(plan.shape);
}

}  // namespace distrain::table
