#include "query_plan.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace distrain::table {

namespace {

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
  if (!query.offsets.defined() || query.offsets.dim() != 1 || query.ids.dim() != 1 ||
      !at::isIntegralType(query.offsets.scalar_type(), false)) {
    refuse(table, "bags need ids and whole offsets of one dimension");
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
    refuse(table, "weights must be floats on the CPU, one for each id, and need sums");
  }
  if (query.weights.defined() && !at::isfinite(query.weights).all().item<bool>()) {
    throw base::Exception(base::ErrorKind::kNotFinite,
                          "a weight of a lookup in table " + table.name + " is not finite");
  }
  return at::tensor(offsets, at::kLong);
}

// Returns hash % servers. A division takes longer than all else that is done for an id.
size_t server_of(uint64_t hash, size_t servers) {
  const bool is_power_of_two = (servers & (servers - 1)) == 0;
  return is_power_of_two ? hash & (servers - 1) : hash % servers;
}

}  // namespace

/// The backward function of all results of a lookup. Its inputs are the results' gradients, its
/// outputs the gradients of the leaf and of the weights.
struct LookupBackward final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const at::NoGradGuard no_grad;
    torch::autograd::variable_list result(1 + grads.size());
    at::Tensor& of_leaf = result[0] = at::empty(plan->leaf_.sizes(), at::kFloat);
    for (size_t q = 0; q < grads.size(); ++q) {
      const QueryPlan& query = plan->queries_[q];
      if (!grads[q].defined()) {
        set_zero(query, q, of_leaf);
        continue;
      }
      const at::Tensor grad = grads[q].contiguous();
      const rows::BagGradients bags(query.bags());
      if (query.is_pooled) {
        copy_to_servers(query, grad, of_leaf);
      } else {
        sum_by_row(query, bags, grad, of_leaf);
      }
      if (task_should_compute_output(1 + q)) result[1 + q] = of_weights(query, bags, grad);
    }
    for (size_t q = 0; q < grads.size(); ++q) {  // after all that may throw
      if (grads[q].defined()) std::atomic_ref(plan->learns_[q]).store(1, std::memory_order_relaxed);
    }
    return result;
  }
  std::string name() const override { return "distrain::LookupBackward"; }

  void set_zero(const QueryPlan& query, size_t q, at::Tensor& of_leaf) const {
    for (size_t server = 0; server < query.starts.size(); ++server) {
      const LookupPart& part = plan->ids_[server].parts[q];
      const auto count = static_cast<size_t>(part.vectors()) * query.dim;
      std::fill_n(of_leaf.mutable_data_ptr<float>() + query.starts[server], count, 0.0F);
    }
  }

  // Gives each server, which has added its rows of each bag, the gradients of the bags.
  void copy_to_servers(const QueryPlan& query, const at::Tensor& grad, at::Tensor& of_leaf) const {
    const at::Tensor scaled = query.is_mean ? grad * means_factor(query) : grad;
    for (const uint32_t start : query.starts) {
      std::copy_n(scaled.const_data_ptr<float>(), scaled.numel(),
                  of_leaf.mutable_data_ptr<float>() + start);
    }
  }

  static void sum_by_row(const QueryPlan& query, const rows::BagGradients& bags,
                         const at::Tensor& grad, at::Tensor& of_leaf) {
    constexpr int64_t kRowsPerTask = 1024;
    const rows::Gradients<float> gradients = bags.of(grad.const_data_ptr<float>());
    float* const sums = of_leaf.mutable_data_ptr<float>();
    at::parallel_for(0, static_cast<int64_t>(query.groups.size()), kRowsPerTask,
                     [&](int64_t first, int64_t last) {
                       rows::sum_gradients(query.dim, query.groups, gradients, query.row_of, sums,
                                           static_cast<size_t>(first), static_cast<size_t>(last));
                     });
  }

  at::Tensor of_weights(const QueryPlan& query, const rows::BagGradients& bags,
                        const at::Tensor& grad) const {
    at::Tensor result = at::empty({std::ssize(query.row_of)}, at::kFloat);
    for (size_t p = 0; p < query.row_of.size(); ++p) {
      const float* const a = grad.const_data_ptr<float>() + bags.rows[p] * query.dim;
      const float* const b = plan->leaf_.const_data_ptr<float>() + query.row_of[p];
      result.mutable_data_ptr<float>()[p] = std::inner_product(a, a + query.dim, b, 0.0F);
    }
    return result;
  }

  // Returns 1 / the number of ids of each bag, float [bags, 1].
  static at::Tensor means_factor(const QueryPlan& query) {
    return query.offsets.diff().clamp_min(1).to(at::kFloat).reciprocal().unsqueeze(1);
  }

  std::shared_ptr<LookupPlan> plan;
};

LookupPlan::LookupPlan(const std::vector<Query>& queries, const std::vector<TableOptions>& tables,
                       size_t servers, size_t bytes_of_number)
    : ids_(servers), by_server_(servers), learns_(queries.size()) {
  const auto has_weights = [](const Query& query) { return query.weights.defined(); };
  const bool any_weights = std::ranges::any_of(queries, has_weights);
  for (const Query& query : queries) {
    if (query.table < 0 || query.table >= std::ssize(tables)) base::invalid("no such table");
    const TableOptions& table = tables[static_cast<size_t>(query.table)];
    const at::Tensor ids_tensor = flat_ids(query, table);
    const auto ids = span_of<uint64_t>(ids_tensor);
    QueryPlan& plan = queries_.emplace_back(QueryPlan{.table = query.table});
    plan.dim = static_cast<size_t>(table.dim);
    plan.offsets = all_offsets(query, table, ids_tensor.numel());
    plan.shape = query.ids.sizes().vec();
    if (plan.offsets.defined()) plan.shape = {plan.offsets.numel() - 1};
    plan.shape.push_back(table.dim);
    plan.is_mean = query.pooling == Pooling::kMean;
    plan.callers_weights = query.weights;
    if (query.weights.defined()) plan.weights = query.weights.detach().clone().contiguous();
    const bool weights_learn = query.weights.defined() && query.weights.requires_grad();
    if (plan.offsets.defined() && bytes_of_number > 0 && !weights_learn) {
      // A vector travels twice, as a row and as a gradient.
      const size_t vector = 2 * bytes_of_number * plan.dim + sizeof(int64_t);
      const auto bags = static_cast<size_t>(plan.offsets.numel() - 1);
      const size_t pooled = bags * servers * vector + ids.size() * sizeof(int64_t);
      // The ids are grouped only if the number of distinct ids is likely to matter.
      constexpr size_t kFewOfAnId = 8;
      plan.is_pooled = pooled < ids.size() / kFewOfAnId * vector;
      if (!plan.is_pooled && pooled < ids.size() * vector) {
        plan.groups.assign(ids);
        plan.is_pooled = pooled < plan.groups.size() * vector;
      }
    }
    if (!plan.is_pooled && plan.groups.total() != ids.size()) plan.groups.assign(ids);
    divide(plan, ids);
    for (Ids& each : by_server_) {
      if (any_weights) each.weights.resize(each.ids.size(), 1);
    }
  }
  int64_t base = 0;
  for (size_t server = 0; server < servers; ++server) {
    Ids& its = by_server_[server];
    bases_.push_back(base);
    base += its.numbers;
    ids_[server] = {std::move(its.parts), at::tensor(its.ids, at::kLong)};
    if (!its.offsets.empty()) ids_[server].offsets = at::tensor(its.offsets, at::kLong);
    if (any_weights) ids_[server].weights = at::tensor(its.weights, at::kFloat);
  }
  bases_.push_back(base);
  if (base >> 32 != 0) base::invalid("a lookup of 2^32 numbers or more");
  by_server_.clear();
  for (QueryPlan& plan : queries_) {
    for (size_t server = 0; server < servers; ++server) {
      plan.starts[server] += static_cast<uint32_t>(bases_[server]);
    }
    if (plan.is_pooled) continue;
    std::vector<uint32_t> next = plan.starts;
    plan.row_of.resize(plan.groups.total());
    for (size_t i = 0; i < plan.groups.size(); ++i) {
      uint32_t& start = next[server_of(plan.groups.hashes()[i], servers)];
      for (const uint32_t p : plan.groups.positions_of(i)) plan.row_of[p] = start;
      start += static_cast<uint32_t>(plan.dim);
    }
  }
}

// Gives each server the ids that it holds: those of each bag if the servers pool, otherwise the
// distinct ids in the order of their hashes.
void LookupPlan::divide(QueryPlan& plan, std::span<const uint64_t> ids) {
  const size_t servers = by_server_.size();
  for (Ids& each : by_server_) {
    plan.starts.push_back(static_cast<uint32_t>(each.numbers));
    each.parts.push_back({plan.table, -std::ssize(each.ids)});
  }
  if (plan.is_pooled) {
    const auto offsets = span_of<int64_t>(plan.offsets);
    const auto weights = span_of<float>(plan.weights);
    std::vector<int64_t> first;
    for (Ids& each : by_server_) first.push_back(std::ssize(each.ids));
    for (size_t bag = 0; bag < offsets.size(); ++bag) {
      for (size_t server = 0; server < servers; ++server) {
        Ids& its = by_server_[server];
        its.offsets.push_back(std::ssize(its.ids) - first[server]);
      }
      if (bag + 1 == offsets.size()) break;
      for (auto p = static_cast<size_t>(offsets[bag]); p < static_cast<size_t>(offsets[bag + 1]);
           ++p) {
        Ids& its = by_server_[server_of(rows::hash_of_id(ids[p]), servers)];
        if (!weights.empty()) {
          its.weights.resize(its.ids.size(), 1);
          its.weights.push_back(weights[p]);
        }
        its.ids.push_back(static_cast<int64_t>(ids[p]));
      }
    }
  } else {
    for (size_t i = 0; i < plan.groups.size(); ++i) {
      by_server_[server_of(plan.groups.hashes()[i], servers)].ids.push_back(
          static_cast<int64_t>(plan.groups.ids()[i]));
    }
  }
  for (Ids& each : by_server_) {
    LookupPart& part = each.parts.back();
    part.ids += std::ssize(each.ids);
    if (plan.is_pooled) part.bags = plan.offsets.numel() - 1;
    each.numbers += part.vectors() * static_cast<int64_t>(plan.dim);
  }
}

at::Tensor LookupPlan::result_of(const QueryPlan& plan) const {
  at::Tensor result = at::empty(plan.shape, at::kFloat);
  float* const to = result.mutable_data_ptr<float>();
  const float* const values = leaf_.const_data_ptr<float>();
  if (plan.is_pooled) {
    const auto sums_of = [&](size_t server) {
      return leaf_.narrow(0, plan.starts[server], result.numel()).view(plan.shape);
    };
    result.copy_(sums_of(0));
    for (size_t server = 1; server < plan.starts.size(); ++server) {
      result += sums_of(server);
    }
    if (plan.is_mean) result *= LookupBackward::means_factor(plan);
  } else if (plan.offsets.defined()) {
    pool(values, plan.dim, 1, plan.row_of, plan.bags(), to);
  } else {
    constexpr int64_t kRowsPerTask = 2048;
    at::parallel_for(0, std::ssize(plan.row_of), kRowsPerTask, [&](int64_t first, int64_t last) {
      for (auto p = static_cast<size_t>(first); p < static_cast<size_t>(last); ++p) {
        std::copy_n(values + plan.row_of[p], plan.dim, to + p * plan.dim);
      }
    });
  }
  return result;
}

std::vector<at::Tensor> LookupPlan::results(const std::shared_ptr<LookupPlan>& plan,
                                            const std::vector<at::Tensor>& replies, bool learns) {
  std::vector<at::Tensor> vectors;
  for (size_t server = 0; server < replies.size(); ++server) {
    const int64_t numbers = plan->bases_[server + 1] - plan->bases_[server];
    if (!replies[server].defined() || replies[server].sizes() != at::IntArrayRef({numbers})) {
      wire::Reader::fail("rows of another shape than the lookup");
    }
    vectors.push_back(replies[server].to(at::kFloat));
  }
  plan->leaf_ = vectors.size() == 1 ? vectors[0].contiguous() : at::cat(vectors);
  std::vector<at::Tensor> results;
  for (const QueryPlan& each : plan->queries_) results.push_back(plan->result_of(each));
  if (!learns) return results;
  const auto node = std::make_shared<LookupBackward>();
  node->plan = plan;
  std::vector<at::Tensor> inputs{plan->leaf_.set_requires_grad(true)};
  for (const QueryPlan& each : plan->queries_) {
    inputs.push_back(each.callers_weights);
  }
  node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(inputs)));
  torch::autograd::set_history(results, node);
  return results;
}

}  // namespace distrain::table
