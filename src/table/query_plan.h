#pragma once

#include "distrain/table/sharded_embedding.h"
#include "table_set.h"

namespace distrain::table {

/// How the vectors that arrive for a query become its result on this rank.
struct GatherPlan {
  rows::IdGroups groups;          // of all ids of the query
  std::vector<uint32_t> leaf_of;  // the vector of each distinct id
  std::vector<uint32_t> row_of;   // the vector of each position
  at::Tensor offsets;             // int64 [bags + 1]; without pooling, each position is a bag
  bool is_mean = false;
};

/// A query, divided among servers. The vectors of all servers, in their order, are the rows of
/// `leaf`, whose gradient is pushed.
struct QueryPlan {
  /// Returns the rows of `gradient`, which is undefined or like `leaf`, that belong to a server.
  at::Tensor of_server(const at::Tensor& gradient, size_t server) const {
    int64_t start = 0;
    for (size_t each = 0; each < server; ++each) start += parts[each].vectors();
    return gradient.defined() ? gradient.narrow(0, start, parts[server].vectors()) : gradient;
  }

  std::vector<LookupPart> parts;       // by server
  std::vector<int64_t> shape;          // of the result
  std::shared_ptr<GatherPlan> gather;  // null: the servers pool
  at::Tensor weights;                  // of a query that is pooled here
  at::Tensor share;                    // float [bags, 1]: a mean's factor if the servers pool
  at::Tensor leaf;                     // set by finish()
};

/// Divides a query. `bytes_of_number` is the size of a number in messages; 0: the servers do not
/// pool. Throws `invalid` if the query is not valid.
QueryPlan plan_query(const Query& query, const TableOptions& table, size_t servers,
                     size_t bytes_of_number);

/// Returns the result of the query from `plan.leaf`, with gradients for the leaf and the weights.
at::Tensor result_of(const QueryPlan& plan);

}  // namespace distrain::table
