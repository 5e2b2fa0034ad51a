#include "table_set.h"

#include <numeric>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

namespace distrain::table {

namespace {

rows::InitialValue initial_value_of(const TableOptions& options) {
  if (!options.drawn_by_torch) {
    if (options.range == 0) return rows::keyed_normal(options.seed, 1);
    return rows::keyed_uniform(options.seed, static_cast<float>(options.range));
  }
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  at::Tensor all = at::empty({options.num_rows, options.dim});
  options.range == 0 ? all.normal_(0, 1, generator)
                     : all.uniform_(-options.range, options.range, generator);
  return [all](uint64_t id, std::span<float> value) {
    std::ranges::fill(value, 0.0F);
    if (id >= static_cast<uint64_t>(all.size(0))) return;  // no client asks for such an id
    std::copy_n(all.const_data_ptr<float>() + id * value.size(), value.size(), value.begin());
  };
}

// Calls `f(first, last)` for ranges of the distinct ids, in several threads if there are many.
template <class F>
void for_ranges(const rows::IdGroups& groups, const F& f) {
  constexpr size_t kIdsPerThread = 4096;
  const size_t threads =
      std::min(static_cast<size_t>(at::get_num_threads()), 1 + groups.total() / kIdsPerThread);
  if (threads <= 1) return f(size_t{0}, groups.size());
  const std::vector<size_t> bounds = groups.split(threads);
  at::parallel_for(0, std::ssize(bounds) - 1, 1, [&](int64_t first, int64_t last) {
    for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
      f(bounds[i], bounds[i + 1]);
    }
  });
}

std::vector<TableGradients::Part> gradients_of(std::vector<Push>& pushes) {
  std::vector<TableGradients::Part> all;
  for (Push& push : pushes) {
    for (auto& [lookup, gradient] : push.lookups) {
      gradient.numbers = gradient.numbers.to(at::kFloat).contiguous();
      for (const int part : gradient.parts) {
        const PartView& view = lookup->views[static_cast<size_t>(part)];
        const KeptPart& kept = lookup->parts[static_cast<size_t>(part)];
        all.push_back({&view, gradient.numbers, &kept});
      }
    }
  }
  return all;
}

}  // namespace

void pool(const float* values, size_t dim, size_t stride, std::span<const uint32_t> row_of,
          const rows::Bags& bags, float* pooled) {
  constexpr int64_t kBagsPerTask = 512;
  at::parallel_for(0, static_cast<int64_t>(bags.size()), kBagsPerTask,
                   [&](int64_t first, int64_t last) {
                     rows::pool_rows(values, dim, stride, row_of, bags, pooled,
                                     static_cast<size_t>(first), static_cast<size_t>(last));
                   });
}

std::vector<PartView> parts_of(const ServerIds& all,
                               const std::function<int64_t(int table)>& dim_of) {
  const auto check = [](bool good) {
    if (!good) wire::Reader::fail("a malformed lookup of a table");
  };
  const auto check_vector = [&](const at::Tensor& tensor, at::ScalarType type) {
    check(tensor.is_cpu() && tensor.dim() == 1 && tensor.scalar_type() == type &&
          tensor.is_contiguous());
  };
  check(all.ids.defined());
  check_vector(all.ids, at::kLong);
  if (all.offsets.defined()) check_vector(all.offsets, at::kLong);
  if (all.weights.defined()) check_vector(all.weights, at::kFloat);
  auto ids = span_of<uint64_t>(all.ids);
  auto offsets = span_of<int64_t>(all.offsets);
  auto weights = span_of<float>(all.weights);
  check(weights.empty() || weights.size() == ids.size());
  std::vector<PartView> views;
  size_t first = 0;
  const auto take = [&]<class T>(std::span<T>& from, int64_t count) {
    check(count >= 0 && count <= std::ssize(from));
    const auto taken = from.first(static_cast<size_t>(count));
    from = from.subspan(taken.size());
    return taken;
  };
  for (const LookupPart& part : all.parts) {
    const int64_t dim = dim_of(part.table);
    check(dim > 0 && part.bags >= -1);
    PartView view{.table = part.table, .ids = take(ids, part.ids), .is_pooled = part.bags >= 0};
    const auto its_weights = weights.empty() ? weights : take(weights, part.ids);
    if (view.is_pooled) {
      view.bags = {take(offsets, part.bags + 1), its_weights};
      check(view.bags.offsets.front() == 0 && view.bags.offsets.back() == part.ids &&
            std::ranges::is_sorted(view.bags.offsets));
    }
    view.first = first;
    view.vectors = part.vectors();
    first += static_cast<size_t>(view.vectors * dim);
    views.push_back(view);
  }
  check(ids.empty() && offsets.empty());
  return views;
}

TableGradients::TableGradients(std::span<const Part> parts, int64_t dim)
    : dim_(static_cast<size_t>(dim)) {
  if (parts.size() == 1 && parts[0].kept) known_groups_ = &parts[0].kept->groups;
  if (parts.size() == 1 && !parts[0].part->is_pooled) {
    numbers_ = parts[0].numbers;
    first_ = numbers_.const_data_ptr<float>() + parts[0].part->first;
    if (!known_groups_) own_groups_.assign(parts[0].part->ids);
    return;
  }
  std::vector<at::Tensor> values;
  std::vector<uint64_t> ids;
  uint32_t vectors = 0;
  for (const Part& each : parts) {
    const PartView& part = *each.part;
    const size_t start = rows_.size();
    if (part.is_pooled) {
      const rows::BagGradients bags(part.bags);
      rows_.resize(start + bags.rows.size());
      for (size_t p = 0; p < bags.rows.size(); ++p) rows_[start + p] = vectors + bags.rows[p];
      if (!bags.factors.empty()) factors_.resize(start, 1);
      factors_.insert(factors_.end(), bags.factors.begin(), bags.factors.end());
    } else {
      rows_.resize(start + part.ids.size());
      std::iota(rows_.begin() + static_cast<std::ptrdiff_t>(start), rows_.end(), vectors);
    }
    if (!factors_.empty()) factors_.resize(rows_.size(), 1);
    vectors += static_cast<uint32_t>(part.vectors);
    values.push_back(each.numbers.narrow(0, static_cast<int64_t>(part.first), part.vectors * dim));
    ids.insert(ids.end(), part.ids.begin(), part.ids.end());
  }
  numbers_ = at::cat(values);
  first_ = numbers_.const_data_ptr<float>();
  if (!known_groups_) own_groups_.assign(ids);
}

// Sets the learning rate and the rule. Returns the options of the rows.
rows::RowStoreOptions Table::set_optimizer() {
  if (options.dim <= 0 || options.num_rows < 0 || options.max_rows < 0 || options.range < 0 ||
      (options.drawn_by_torch && options.num_rows == 0)) {
    base::invalid("the options of table " + options.name + " are out of range");
  }
  try {
    const optim::OptimizerOptions chosen = optim::from_fields(options.optimizer);
    lr = std::visit([](const auto& its) { return its.lr; }, chosen);
    rule = optim::UpdateRule(chosen).row_rule();
  } catch (const base::Exception& error) {
    base::invalid("table " + options.name + ": " + error.what());
  }
  if (options.optimizer.name == optim::kRowwiseAdagrad) {
    rule.optimizer = rows::Optimizer::kRowwiseAdagrad;
  }
  rows::RowStoreOptions rows{.dim = static_cast<size_t>(options.dim),
                             .max_rows = static_cast<uint64_t>(options.max_rows),
                             .initial_value = initial_value_of(options)};
  rows::set_state(rows, rule);
  return rows;
}

void TableSet::check_same(OpenRequest request) const {
  request.participant = options_.participant;
  request.dtype = options_.dtype;
  if (request == options_) return;
  const auto [mine, its] = std::ranges::mismatch(options_.tables, request.tables);
  const bool is_option =
      mine != options_.tables.end() && its != request.tables.end() && mine->name == its->name;
  base::invalid("these tables are open already, with other " +
                (is_option ? "options of table " + mine->name
                           : "tables beside them, servers, participants or mode"));
}

LookupReply TableSet::read(KeptLookup& kept, bool creates) const {
  int64_t numbers = 0;
  kept.views = parts_of(kept.ids, [&](int index) {
    return index >= 0 && index < std::ssize(tables_) ? table(index).options.dim : 0;
  });
  for (const PartView& part : kept.views) numbers += part.vectors * table(part.table).options.dim;
  at::Tensor reply = at::empty({numbers}, at::kFloat);
  kept.parts.reserve(kept.views.size());
  for (const PartView& view : kept.views) {
    KeptPart& part = kept.parts.emplace_back(&kept.memory);
    rows::RowStore& store = table(view.table).store;
    const size_t dim = store.options().dim;
    part.groups.assign(view.ids);
    part.numbers.resize(part.groups.size());
    if (!view.is_pooled && !std::ranges::equal(view.ids, part.groups.ids())) {
      wire::Reader::fail("a lookup with ids that are not distinct and in order");
    }
    float* const result = reply.mutable_data_ptr<float>() + view.first;
    at::Tensor rows;  // of the distinct ids of bags
    if (view.is_pooled) {
      rows = at::empty({static_cast<int64_t>(part.groups.size() * dim)}, at::kFloat);
    }
    float* const to = view.is_pooled ? rows.mutable_data_ptr<float>() : result;
    for_ranges(part.groups, [&](size_t first, size_t last) {
      store.read(part.groups, part.numbers, creates, to, first, last);
    });
    if (view.is_pooled) pool(to, dim, dim, part.groups.inverse(), view.bags, result);
  }
  return reply;
}

void TableSet::check(const KeptLookup& lookup, const LookupGradient& gradient) const {
  int64_t numbers = 0;
  for (const PartView& part : lookup.views) numbers += part.vectors * table(part.table).options.dim;
  const auto& its = gradient.parts;
  const bool good = gradient.numbers.defined() && gradient.numbers.is_cpu() &&
                    at::isFloatingType(gradient.numbers.scalar_type()) &&
                    gradient.numbers.sizes() == at::IntArrayRef({numbers}) &&
                    std::ranges::adjacent_find(its, std::greater_equal()) == its.end() &&
                    (its.empty() || (its.front() >= 0 && its.back() < std::ssize(lookup.views)));
  if (!good) wire::Reader::fail("gradients of another shape than their lookup");
}

optim::Norms TableSet::apply(std::vector<Push>& all) {
  const PushRequest& first = all[0].request;
  for (const Push& push : all) {
    if (push.request.lr_factor == first.lr_factor && push.request.scale == first.scale) continue;
    base::invalid("the participants step with different learning rates or clip differently");
  }
  TableGradients::for_each_table(gradients_of(all), [&](int index, const auto& parts) {
    Table& table = *tables_[static_cast<size_t>(index)];
    const KeptPart* const only = parts.size() == 1 ? parts[0].kept : nullptr;
    const TableGradients sum(parts, table.options.dim);
    const rows::IdGroups& groups = sum.groups();
    std::vector<rows::RowNumber> found(only ? 0 : groups.size());
    if (!only) table.store.find(groups, found);
    const std::span<const rows::RowNumber> numbers = only ? std::span(only->numbers) : found;
    const rows::Step step{table.lr * first.lr_factor, static_cast<int64_t>(++table.updates),
                          first.scale / static_cast<double>(all.size())};
    for_ranges(groups, [&](size_t begin, size_t end) {
      rows::update_rows(table.store, table.rule, step, groups, numbers, sum.gradients(), begin,
                        end);
    });
  });
  return {};
}

optim::Norms TableSet::norms(std::vector<Push>& all) const {
  const auto count = static_cast<double>(all.size());
  optim::Norms norms;
  TableGradients::for_each_table(gradients_of(all), [&](int index, const auto& parts) {
    norms.shared +=
        TableGradients(parts, table(index).options.dim).norm_squared() / (count * count);
  });
  for (const Push& push : all) norms.own += push.request.own_norm / count;
  if (!std::isfinite(norms.shared + norms.own)) {
    throw base::Exception(base::ErrorKind::kNotFinite, "the norm of the gradients is not finite");
  }
  return norms;
}

}  // namespace distrain::table
