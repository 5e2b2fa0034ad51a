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

using Answer = std::shared_ptr<base::Promise<optim::Norms>>;  ///< the result of a push

/// A participant's push of a step. The lookups are taken out of the request's `gradients`.
struct Push {
  PushRequest request;
  std::vector<std::pair<std::shared_ptr<const KeptLookup>, LookupReply>> lookups;
  Answer answer;  // null if it has been answered
};

/// The steps of a set in sync mode, or of a session in async mode: Note [Steps of tables].
struct Steps {
  struct WaitingLookup {
    uint64_t session;
    std::shared_ptr<base::Promise<void>> may_go_on = std::make_shared<base::Promise<void>>();
  };
  /// Returns true if the next step does not wait for this participant.
  bool has(int participant) const {
    const auto it = pushes.find(participant);
    return it != pushes.end() && it->second.answer;
  }

  const int participants = 1;
  uint64_t ended = 0;                // number of the last step that was applied or failed
  std::optional<base::Error> error;  // of that step
  std::map<int, Push> pushes;        // of step `ended` + 1, by participant
  base::TimePoint since;             // when the first of these pushes arrived
  std::optional<base::Error> lost;   // fails all steps: a rank is lost or has closed the tables
  std::multimap<uint64_t, WaitingLookup> waiting;  // by the step that must have ended
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
  explicit TableSet(OpenRequest request);

  /// Throws `invalid` if a session gives other options.
  void check_same(OpenRequest request) const;
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

  std::shared_ptr<Steps> steps;  // null in async mode; guarded by TableServer's mutex

 private:
  Table& table(const LookupPart& part) const { return *tables_[static_cast<size_t>(part.table)]; }
  void check(const LookupPart& part) const;

  const OpenRequest options_;
  std::vector<std::unique_ptr<Table>> tables_;
};

/// Calls `Method` of this rank's TableServer for another rank.
template <auto Method, class Request>
auto serve(rpc::CallContext& call, Request request) {
  return (call.agent.local<TableServer>().*Method)(
      std::move(request), rpc::process_number(call.caller.rank, call.caller.incarnation));
}

}  // namespace distrain::table
