#pragma once

#include <algorithm>
#include <functional>
#include <memory_resource>
#include <optional>
#include <span>

#include "distrain/rows/kernels.h"
#include "distrain/table/table_server.h"

namespace distrain::table {

template <class T>
std::span<const T> span_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {static_cast<const T*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.numel())};
}

/// Pools bags into `pooled`. Position p of a bag has the vector `values` + row_of[p] * stride.
void pool(const float* values, size_t dim, size_t stride, std::span<const uint32_t> row_of,
          const rows::Bags& bags, float* pooled);

/// A part of a lookup with its elements of the tensors of ServerIds, and its place in the reply.
struct PartView {
  int table = 0;
  std::span<const uint64_t> ids{};
  bool is_pooled = false;
  rows::Bags bags{};  // if it is pooled
  size_t first = 0;   // its first number in the reply
  int64_t vectors = 0;
};
/// Returns the parts of `ids`. Throws `protocol` if `ids` is malformed. `dim_of` returns the
/// numbers of a row of a table, or 0 if there is no such table.
std::vector<PartView> parts_of(const ServerIds& ids,
                               const std::function<int64_t(int table)>& dim_of);

/// A part of a lookup, as the server keeps it for the push.
struct KeptPart {
  explicit KeptPart(std::pmr::memory_resource* memory) : groups(memory), numbers(memory) {}
  rows::IdGroups groups;                      // of the part's ids
  std::pmr::vector<rows::RowNumber> numbers;  // the row of each distinct id
};

/// A lookup, as the server keeps it for the push.
struct KeptLookup {
  explicit KeptLookup(ServerIds its_ids)
      : ids(std::move(its_ids)),
        memory(std::min(kLargestBlock,
                        64 * (1 + ids.parts.size()) + 32 * static_cast<size_t>(ids.ids.numel()))) {}

  static constexpr size_t kLargestBlock = size_t{1} << 20;
  ServerIds ids;
  std::vector<PartView> views;  // of the ids
  // Allocates one block for the arrays of all parts unless they are large, because a lookup can
  // have many small parts.
  std::pmr::monotonic_buffer_resource memory;
  std::vector<KeptPart> parts;
};

/// The gradients of one table, which the kernels add by id in the order of the parts.
class TableGradients {
 public:
  struct Part {
    const PartView* part;
    at::Tensor numbers;              // float: a LookupReply of gradients
    const KeptPart* kept = nullptr;  // on a server
  };
  TableGradients(std::span<const Part> parts, int64_t dim);

  /// Calls `f(table, its parts)` for each table. Keeps the order of a table's parts.
  template <class F>
  static void for_each_table(std::vector<Part> parts, const F& f) {
    const auto table_of = [](const Part& each) { return each.part->table; };
    std::ranges::stable_sort(parts, {}, table_of);
    for (auto first = parts.begin(); first != parts.end();) {
      const auto last =
          std::ranges::upper_bound(first, parts.end(), table_of(*first), {}, table_of);
      f(table_of(*first), std::span<const Part>(first, last));
      first = last;
    }
  }

  const rows::IdGroups& groups() const { return known_groups_ ? *known_groups_ : own_groups_; }
  rows::Gradients<float> gradients() const {
    return {first_, rows_.data(), factors_.empty() ? nullptr : factors_.data()};
  }
  double norm_squared() const {
    return rows::gradient_norm_squared(dim_, groups(), gradients(), 0, groups().size());
  }

 private:
  const size_t dim_;
  at::Tensor numbers_;  // float: the vectors of all parts, and of others before `first_`
  const float* first_ = nullptr;
  std::vector<uint32_t> rows_;  // the vector of each position; empty: position p has vector p
  std::vector<float> factors_;  // by position; empty: 1
  rows::IdGroups own_groups_;
  const rows::IdGroups* known_groups_ = nullptr;
};

using Answer = std::shared_ptr<base::Promise<optim::Norms>>;  ///< the result of a push

/// A participant's push of a step. The lookups are taken out of the request's `gradients`.
struct Push {
  PushRequest request;
  std::vector<std::pair<std::shared_ptr<const KeptLookup>, LookupGradient>> lookups;
  Answer answer;  // null if it has been answered
};

/// The steps of a set in sync mode, or of a session in async mode: Note [Steps of tables].
struct Steps {
  const int participants = 1;
  uint64_t applied = 0;               // number of the last step that was applied
  std::optional<base::Error> failed;  // of the current step and all later ones
  std::map<int, Push> pushes;         // of step `applied` + 1, by participant
  base::TimePoint since;              // when the first of these pushes arrived
  // The lookups that wait, by the step that must be applied.
  std::multimap<uint64_t, std::shared_ptr<base::Promise<void>>> waiting;
};

struct Table {
  /// Throws `invalid` if the options are not valid or rows do not support the optimizer.
  explicit Table(const TableOptions& table_options)
      : options(table_options), store(set_optimizer()) {}

  const TableOptions options;
  double lr = 0;
  rows::RowRule rule;
  rows::RowStore store;
  std::atomic<uint64_t> updates{0};  // number of steps that had gradients for the table

 private:
  rows::RowStoreOptions set_optimizer();
};

/// Tables that are looked up and updated together. Thread-safe: the tables lock their rows.
class TableSet {
 public:
  explicit TableSet(OpenRequest request) : options_(std::move(request)) {
    for (const TableOptions& options : options_.tables) {
      if (find(options.name)) base::invalid("there are two tables named " + options.name);
      tables_.push_back(std::make_unique<Table>(options));
    }
  }

  /// Throws `invalid` if a session gives other options.
  void check_same(OpenRequest request) const;
  /// Returns null if there is no such table.
  Table* find(const std::string& name) const {
    for (const auto& table : tables_) {
      if (table->options.name == name) return table.get();
    }
    return nullptr;
  }

  /// Looks up `kept.ids` and sets the other members. Makes missing rows if `creates`. Returns
  /// floats. Throws `protocol` if the ids are malformed.
  LookupReply read(KeptLookup& kept, bool creates) const;
  /// Throws `protocol` if the gradients do not fit the lookup.
  void check(const KeptLookup& lookup, const LookupGradient& gradient) const;
  /// Updates the tables by the mean of `pushes`. Throws `invalid` if their factors differ. Returns
  /// zeros.
  optim::Norms apply(std::vector<Push>& pushes);
  /// Returns the norms of the mean of `pushes`. Throws `not_finite`.
  optim::Norms norms(std::vector<Push>& pushes) const;

  std::shared_ptr<Steps> steps;  // null in async mode; guarded by TableServer's mutex

 private:
  Table& table(int index) const { return *tables_[static_cast<size_t>(index)]; }

  const OpenRequest options_;
  std::vector<std::unique_ptr<Table>> tables_;
};

/// Name of the function that answers a LookupRequest with a LookupReply.
inline constexpr char kLookUp[] = "distrain.table.look_up";

/// Calls `Method` of this rank's TableServer for another rank.
template <auto Method, class Request>
auto serve(rpc::CallContext& call, Request request) {
  return (call.agent.local<TableServer>().*Method)(
      std::move(request), rpc::process_number(call.caller.rank, call.caller.incarnation));
}

}  // namespace distrain::table
