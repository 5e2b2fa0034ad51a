#pragma once

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

/// Returns the pooled rows of the bags. Position p of a bag has the row `row_of[p]` of `rows`.
at::Tensor pool(const at::Tensor& rows, const std::vector<uint32_t>& row_of,
                const rows::Bags<float>& bags);

/// The gradients of one table, which the kernels add by id in the order of the parts.
class TableGradients {
 public:
  struct Part {
    const LookupPart* part;
    at::Tensor values;                       // [part->vectors(), dim] of any floating type
    const rows::IdGroups* groups = nullptr;  // of the part's ids, if they are known
  };
  explicit TableGradients(const std::vector<Part>& parts);

  const rows::IdGroups& groups() const { return known_groups_ ? *known_groups_ : own_groups_; }
  rows::Gradients<float> gradients() const {
    return {values_.const_data_ptr<float>(), rows_.data(),
            factors_.empty() ? nullptr : factors_.data()};
  }
  double norm_squared() const {
    return rows::gradient_norm_squared(static_cast<size_t>(values_.size(1)), groups(), gradients(),
                                       0, groups().size());
  }

 private:
  at::Tensor values_;           // float [vectors of all parts, dim]
  std::vector<uint32_t> rows_;  // the vector of each position
  std::vector<float> factors_;  // by position; empty: 1
  rows::IdGroups own_groups_;
  const rows::IdGroups* known_groups_ = nullptr;
};

/// A part of a lookup, as the server keeps it for the push.
struct KeptPart {
  LookupPart part;
  rows::IdGroups groups;                 // of part.ids
  std::vector<rows::RowNumber> numbers;  // the row of each distinct id
};
using KeptLookup = std::vector<KeptPart>;

/// A participant's push of a step. The lookups are taken out of the request's `gradients`.
struct Push {
  PushRequest request;
  std::vector<std::pair<std::shared_ptr<const KeptLookup>, LookupReply>> lookups;
};

struct Table {
  explicit Table(const TableOptions& table_options);

  const TableOptions options;
  double lr = 0;
  rows::RowRule rule;
  rows::RowStore store;
};

/// Tables that are looked up and updated together. The mutex of TableServer guards the public
/// members except `updates`. The tables lock their rows themselves.
class TableSet {
 public:
  explicit TableSet(const OpenRequest& request);

  /// Throws `invalid` if a session gives other options.
  void check_same(const OpenRequest& request) const;
  bool is_sync() const { return options_.mode == optim::Sharing::Mode::kSync; }
  int participants() const { return options_.participants; }
  Table* find(const std::string& name) const;  ///< null if there is none

  /// Looks up the ids of `kept.part`. Returns a vector for each row or bag.
  at::Tensor read(KeptPart& kept, bool creates) const;
  /// Throws `protocol` if the gradients have not the shape of the lookup.
  void check(const KeptLookup& lookup, const LookupReply& gradients) const;
  /// Updates the tables by the mean of `pushes`. Throws `invalid` if their factors differ. Returns
  /// no norms.
  optim::Norms apply(const std::vector<Push>& pushes);
  /// Returns the norms of the mean of `pushes`. Throws `not_finite`.
  optim::Norms norms(const std::vector<Push>& pushes) const;

  std::atomic<uint64_t> updates{0};

  // Of sync mode:
  uint64_t steps = 0;                                  // applied ones
  std::map<int, Push> pushes;                          // of the next step, by participant
  std::map<int, base::Promise<optim::Norms>> waiting;  // the answers to `pushes`
  base::TimePoint since;                               // when the first participant pushed
  std::set<int> left;               // participants that have closed their sessions
  std::optional<base::Error> lost;  // the first lost rank

 private:
  Table& table(const LookupPart& part) const { return *tables_[static_cast<size_t>(part.table)]; }
  void check(const LookupPart& part) const;

  const OpenRequest options_;
  std::vector<std::unique_ptr<Table>> tables_;
};

// The functions of a rank's TableServer that other ranks call.
OpenReply open_here(rpc::CallContext& call, const OpenRequest& request);
void close_here(rpc::CallContext& call, uint64_t session);
base::Future<LookupReply> look_up_here(rpc::CallContext& call, LookupRequest request);
base::Future<optim::Norms> push_here(rpc::CallContext& call, PushRequest request);

}  // namespace distrain::table
