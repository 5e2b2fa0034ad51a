#include "table_set.h"

#include <algorithm>
#include <numeric>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

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

// Groups the gradients of table `index`. Returns null if there are none. Sets `only` if they are of
// one part.
std::unique_ptr<TableGradients> gradients_of(const std::vector<Push>& pushes, int index,
                                             const KeptPart** only = nullptr) {
  std::vector<TableGradients::Part> parts;
  for (const Push& push : pushes) {
    for (const auto& [lookup, gradients] : push.lookups) {
      for (size_t i = 0; i < gradients.size(); ++i) {
        const KeptPart& kept = (*lookup)[i];
        if (kept.part.table != index || !gradients[i].defined()) continue;
        if (only) *only = parts.empty() ? &kept : nullptr;
        parts.push_back({&kept.part, gradients[i], &kept.groups});
      }
    }
  }
  return parts.empty() ? nullptr : std::make_unique<TableGradients>(parts);
}

}  // namespace

at::Tensor pool(const at::Tensor& rows, const std::vector<uint32_t>& row_of,
                const rows::Bags<float>& bags) {
  constexpr int64_t kBagsPerTask = 512;
  const auto dim = static_cast<size_t>(rows.size(1));
  const auto size = static_cast<int64_t>(bags.size());
  const at::Tensor pooled = at::empty({size, rows.size(1)}, at::kFloat);
  at::parallel_for(0, size, kBagsPerTask, [&](int64_t first, int64_t last) {
    rows::pool_rows(rows.const_data_ptr<float>(), dim, row_of, bags,
                    pooled.mutable_data_ptr<float>(), static_cast<size_t>(first),
                    static_cast<size_t>(last));
  });
  return pooled;
}

TableGradients::TableGradients(const std::vector<Part>& parts) {
  std::vector<at::Tensor> values;
  std::vector<uint64_t> ids;
  uint32_t vectors = 0;
  for (const Part& each : parts) {
    const auto its_ids = span_of<uint64_t>(each.part->ids);
    const size_t start = rows_.size();
    if (each.part->offsets.defined()) {
      const rows::BagGradients<float> bags({.offsets = span_of<int64_t>(each.part->offsets),
                                            .weights = span_of<float>(each.part->weights)});
      rows_.resize(start + bags.rows.size());
      for (size_t p = 0; p < bags.rows.size(); ++p) rows_[start + p] = vectors + bags.rows[p];
      if (!bags.factors.empty()) factors_.resize(start, 1);
      factors_.insert(factors_.end(), bags.factors.begin(), bags.factors.end());
    } else {
      rows_.resize(start + its_ids.size());
      std::iota(rows_.begin() + static_cast<std::ptrdiff_t>(start), rows_.end(), vectors);
    }
    if (!factors_.empty()) factors_.resize(rows_.size(), 1);
    vectors += static_cast<uint32_t>(each.part->vectors());
    values.push_back(each.values.to(at::kFloat));
    if (parts.size() > 1) ids.insert(ids.end(), its_ids.begin(), its_ids.end());
  }
  values_ = parts.size() == 1 ? values[0].contiguous() : at::cat(values);
  if (parts.size() == 1) known_groups_ = parts[0].groups;
  if (!known_groups_)
    own_groups_.assign(parts.size() == 1 ? span_of<uint64_t>(parts[0].part->ids) : ids);
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
    rule = optim::make_update_rule(chosen)->row_rule();
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

TableSet::TableSet(OpenRequest request) : options_(std::move(request)) {
  for (const TableOptions& options : options_.tables) {
    if (find(options.name)) base::invalid("there are two tables named " + options.name);
    tables_.push_back(std::make_unique<Table>(options));
  }
}

Table* TableSet::find(const std::string& name) const {
  for (const auto& table : tables_) {
    if (table->options.name == name) return table.get();
  }
  return nullptr;
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

void TableSet::check(const LookupPart& part) const {
  const auto is_vector = [](const at::Tensor& tensor, at::ScalarType type) {
    return tensor.defined() && tensor.is_cpu() && tensor.dim() == 1 &&
           tensor.scalar_type() == type && tensor.is_contiguous();
  };
  bool good = part.table >= 0 && part.table < std::ssize(tables_) &&
              is_vector(part.ids, at::kLong) &&
              (!part.weights.defined() ||
               (is_vector(part.weights, at::kFloat) && part.weights.numel() == part.ids.numel()));
  if (good && part.offsets.defined()) {
    good = is_vector(part.offsets, at::kLong) && part.offsets.numel() > 0;
    const auto offsets = good ? span_of<int64_t>(part.offsets) : std::span<const int64_t>();
    good = good && offsets.front() == 0 && offsets.back() == part.ids.numel() &&
           std::ranges::is_sorted(offsets);
  }
  if (!good) wire::Reader::fail("a malformed lookup of a table");
}

at::Tensor TableSet::read(KeptPart& kept, bool creates) const {
  const LookupPart& part = kept.part;
  check(part);
  rows::RowStore& store = table(part).store;
  const size_t dim = store.options().dim;
  const auto width = static_cast<int64_t>(dim);
  kept.groups.assign(span_of<uint64_t>(part.ids));
  kept.numbers.resize(kept.groups.size());
  const at::Tensor rows = at::empty({std::ssize(kept.numbers), width}, at::kFloat);
  for_ranges(kept.groups, [&](size_t first, size_t last) {
    if (creates) {
      store.find_or_create(kept.groups, kept.numbers, first, last);
    } else {
      store.find(kept.groups, kept.numbers, first, last);
    }
    rows::copy_rows(store, kept.groups, kept.numbers, rows.mutable_data_ptr<float>(), first, last);
  });
  // Clients send distinct ids in the order of IdGroups.
  if (!part.offsets.defined() &&
      std::ranges::equal(span_of<uint64_t>(part.ids), kept.groups.ids())) {
    return rows;
  }
  at::Tensor offsets = part.offsets;
  if (!offsets.defined()) offsets = at::arange(part.ids.numel() + 1);
  return pool(rows, kept.groups.inverse(),
              {span_of<int64_t>(offsets), span_of<float>(part.weights)});
}

void TableSet::check(const KeptLookup& lookup, const LookupReply& gradients) const {
  bool good = gradients.size() == lookup.size();
  for (size_t i = 0; good && i < gradients.size(); ++i) {
    const LookupPart& part = lookup[i].part;
    good = !gradients[i].defined() ||
           (gradients[i].is_cpu() && at::isFloatingType(gradients[i].scalar_type()) &&
            gradients[i].sizes() == at::IntArrayRef({part.vectors(), table(part).options.dim}));
  }
  if (!good) wire::Reader::fail("gradients of another shape than their lookup");
}

optim::Norms TableSet::apply(const std::vector<Push>& all) {
  const PushRequest& first = all[0].request;
  for (const Push& push : all) {
    if (push.request.lr_factor == first.lr_factor && push.request.scale == first.scale) continue;
    base::invalid("the participants step with different learning rates or clip differently");
  }
  for (int i = 0; i < std::ssize(tables_); ++i) {
    Table& table = *tables_[static_cast<size_t>(i)];
    const KeptPart* only = nullptr;
    const auto sum = gradients_of(all, i, &only);
    if (!sum) continue;
    const rows::IdGroups& groups = sum->groups();
    std::vector<rows::RowNumber> found(only ? 0 : groups.size());
    if (!only) table.store.find(groups, found);
    const rows::Step step{table.lr * first.lr_factor, static_cast<int64_t>(++table.updates),
                          first.scale / static_cast<double>(all.size())};
    for_ranges(groups, [&](size_t begin, size_t end) {
      rows::update_rows(table.store, table.rule, step, groups, only ? only->numbers : found,
                        sum->gradients(), begin, end);
    });
  }
  return {};
}

optim::Norms TableSet::norms(const std::vector<Push>& all) const {
  const auto count = static_cast<double>(all.size());
  optim::Norms norms;
  for (int i = 0; i < std::ssize(tables_); ++i) {
    if (const auto sum = gradients_of(all, i)) {
      norms.shared += sum->norm_squared() / (count * count);
    }
  }
  for (const Push& push : all) norms.own += push.request.own_norm / count;
  if (!std::isfinite(norms.shared + norms.own)) {
    throw base::Exception(base::ErrorKind::kNotFinite, "the norm of the gradients is not finite");
  }
  return norms;
}

}  // namespace distrain::table
