#pragma once

#include "distrain/table/sharded_embedding.h"
#include "table_set.h"

namespace distrain::table {

/// A query, divided among servers.
struct QueryPlan {
  int table = 0;
  size_t dim = 0;
  std::vector<int64_t> shape;  // of the result
  bool is_pooled = false;      // by the servers
  bool is_mean = false;
  at::Tensor offsets;            // int64 [bags + 1]; undefined without pooling
  at::Tensor callers_weights;    // which may want gradients
  at::Tensor weights;            // a copy, because the caller may change the weights
  rows::IdGroups groups;         // of all ids; may be unset if the servers pool
  std::vector<uint32_t> starts;  // by server: where its vectors begin in the leaf
  std::vector<uint32_t> row_of;  // by position: where its vector begins in the leaf

  rows::Bags bags() const { return {span_of<int64_t>(offsets), span_of<float>(weights), is_mean}; }
};

/// A lookup, divided among servers. What the servers return, one server after another, is one leaf
/// of the autograd graph, whose gradient is pushed.
class LookupPlan {
 public:
  /// `bytes_of_number` is the size of a number in messages; 0: the servers do not pool. Throws
  /// `invalid` or `not_finite` if a query is not valid.
  LookupPlan(const std::vector<Query>& queries, const std::vector<TableOptions>& tables,
             size_t servers, size_t bytes_of_number);

  const std::vector<ServerIds>& ids() const { return ids_; }  ///< by server
  /// Returns the elements of the leaf, or of its gradient, that belong to a server.
  at::Tensor of_server(const at::Tensor& leaf, size_t server) const {
    return leaf.narrow(0, bases_[server], bases_[server + 1] - bases_[server]);
  }
  const std::vector<QueryPlan>& queries() const { return queries_; }

  /// Returns the results of the queries from the servers' replies, with gradients if `learns`.
  static std::vector<at::Tensor> results(const std::shared_ptr<LookupPlan>& plan,
                                         const std::vector<at::Tensor>& replies, bool learns);
  const at::Tensor& leaf() const { return leaf_; }
  /// Returns the queries of whose results the loss depends, ascending.
  std::vector<int> learning() const {
    std::vector<int> queries;
    for (size_t q = 0; q < learns_.size(); ++q) {
      if (learns_[q] != 0) queries.push_back(static_cast<int>(q));
    }
    return queries;
  }

 private:
  friend struct LookupBackward;
  struct Ids {
    std::vector<LookupPart> parts;
    std::vector<int64_t> ids, offsets;
    std::vector<float> weights;  // empty: 1
    int64_t numbers = 0;         // of the reply
  };
  void divide(QueryPlan& plan, std::span<const uint64_t> ids);
  at::Tensor result_of(const QueryPlan& plan) const;

  std::vector<QueryPlan> queries_;
  std::vector<ServerIds> ids_;  // by server
  std::vector<Ids> by_server_;  // while the plan is made
  std::vector<int64_t> bases_;  // by server: where its numbers begin in the leaf; and the end
  at::Tensor leaf_;
  std::vector<uint8_t> learns_;  // by query; set by backward passes
};

}  // namespace distrain::table
