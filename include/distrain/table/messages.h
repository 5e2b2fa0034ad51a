#pragma once

#include <map>
#include <vector>

#include "distrain/optim/distributed_optimizer.h"

namespace distrain::table {

/// A table. All ranks that use it give equal options.
struct TableOptions {
  std::string name;      ///< unique on a server
  int64_t dim = 0;       ///< numbers of a row
  int64_t num_rows = 0;  ///< ids are 0 to num_rows - 1; 0: any 64-bit ids
  uint64_t seed = 0;     ///< a row's initial value depends on the seed and the id alone
  double range = 0;      ///< initial values are uniform in ±range; 0: from N(0, 1)
  /// Draws the initial values of all `num_rows` rows from one generator of torch, as
  /// torch::nn::Embedding does, and keeps them on each server. For small tables.
  bool drawn_by_torch = false;
  int64_t max_rows = 0;  ///< maximum number of rows on a server, above which it throws `resources`
  /// sgd, adagrad, rowwise-adagrad (with the options of adagrad), adam, adamw or rmsprop, without
  /// momentum, amsgrad or centered, and with weight_decay only for adamw: see rows::RowRule.
  optim::OptimizerFields optimizer;

  bool operator==(const TableOptions&) const = default;
  static constexpr auto kFields =
      std::tuple(&TableOptions::name, &TableOptions::dim, &TableOptions::num_rows,
                 &TableOptions::seed, &TableOptions::range, &TableOptions::drawn_by_torch,
                 &TableOptions::max_rows, &TableOptions::optimizer);
};

// Messages between ShardedEmbedding and TableServer. A session is one ShardedEmbedding's use of a
// server. It numbers its lookups and, separately, its steps.

struct OpenRequest {
  std::vector<TableOptions> tables;
  optim::Sharing::Mode mode = optim::Sharing::Mode::kAsync;
  int participants = 1;
  int participant = 0;
  at::ScalarType dtype = at::kFloat;  ///< of the rows in replies: float, bfloat16 or half
  int server = 0;                     ///< the server's number among `servers`
  int servers = 1;

  bool operator==(const OpenRequest&) const = default;
  static constexpr auto kFields = std::tuple(
      &OpenRequest::tables, &OpenRequest::mode, &OpenRequest::participants,
      &OpenRequest::participant, &OpenRequest::dtype, &OpenRequest::server, &OpenRequest::servers);
};
/// The ids of a query that one server holds.
struct LookupPart {
  int table = 0;   ///< index in OpenRequest::tables
  at::Tensor ids;  ///< int64 [n]
  /// int64 [bags + 1]: the server adds the rows of ids offsets[b] to offsets[b + 1] - 1. Undefined:
  /// it returns the row of each id.
  at::Tensor offsets;
  at::Tensor weights;  ///< float [n], of the ids in bags; undefined: 1

  /// Returns the number of vectors that the server returns.
  int64_t vectors() const { return offsets.defined() ? offsets.numel() - 1 : ids.numel(); }
  static constexpr auto kFields =
      std::tuple(&LookupPart::table, &LookupPart::ids, &LookupPart::offsets, &LookupPart::weights);
};

struct LookupRequest {
  uint64_t session = 0;
  uint64_t lookup = 0;
  uint64_t oldest = 0;     ///< no push will name a lookup before this one
  uint64_t after = 0;      ///< number of the step that must have ended
  bool evaluates = false;  ///< makes no rows, and the server does not keep the ids
  std::vector<LookupPart> parts;
  static constexpr auto kFields =
      std::tuple(&LookupRequest::session, &LookupRequest::lookup, &LookupRequest::oldest,
                 &LookupRequest::after, &LookupRequest::evaluates, &LookupRequest::parts);
};
using LookupReply = std::vector<at::Tensor>;  ///< by part: [vectors, dim] in the session's dtype

struct PushRequest {
  /// kApply: adds the gradients and applies the step. kStage: adds the gradients and computes the
  /// norms. kCommit: applies a staged step. kAbandon: makes the step fail, unless it has ended.
  enum class Phase : uint8_t { kApply, kStage, kCommit, kAbandon };
  uint64_t session = 0;
  uint64_t number = 0;  ///< of the session's step, from 1
  Phase phase = Phase::kApply;
  double lr_factor = 1;
  double scale = 1;
  double own_norm = 0;                        ///< optim::NormArguments::own
  std::map<uint64_t, LookupReply> gradients;  ///< by lookup; undefined: the part has no gradient
  static constexpr auto kFields = std::tuple(
      &PushRequest::session, &PushRequest::number, &PushRequest::phase, &PushRequest::lr_factor,
      &PushRequest::scale, &PushRequest::own_norm, &PushRequest::gradients);
};

}  // namespace distrain::table
