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
/// A query's ids that one server holds, as numbers of elements in the tensors of ServerIds.
struct LookupPart {
  int table = 0;      ///< index in OpenRequest::tables
  int64_t ids = 0;    ///< number of ids
  int64_t bags = -1;  ///< number of bags that the server pools; -1: it returns a row for each id

  int64_t vectors() const { return bags < 0 ? ids : bags; }  ///< number of vectors in the reply
  static constexpr auto kFields =
      std::tuple(&LookupPart::table, &LookupPart::ids, &LookupPart::bags);
};

/// The ids of a lookup that one server holds.
struct ServerIds {
  std::vector<LookupPart> parts;
  /// int64: the ids of all parts, one part after another. Without bags, the ids of a part differ
  /// and are in the order of rows::hash_of_id().
  at::Tensor ids;
  /// int64: for each part with bags, the bags + 1 offsets of its bags in its ids, the first of
  /// which is 0 and the last the number of ids. Undefined if there is no such part.
  at::Tensor offsets;
  at::Tensor weights;  ///< float, of all ids of all parts; undefined: 1
  static constexpr auto kFields =
      std::tuple(&ServerIds::parts, &ServerIds::ids, &ServerIds::offsets, &ServerIds::weights);
};

struct LookupRequest {
  uint64_t session = 0;
  uint64_t lookup = 0;
  uint64_t oldest = 0;     ///< no push will name a lookup before this one
  uint64_t after = 0;      ///< number of the step that must be applied
  bool evaluates = false;  ///< makes no rows, and the server does not keep the ids
  ServerIds ids;
  static constexpr auto kFields =
      std::tuple(&LookupRequest::session, &LookupRequest::lookup, &LookupRequest::oldest,
                 &LookupRequest::after, &LookupRequest::evaluates, &LookupRequest::ids);
};
/// The vectors of all parts, one after another: [numbers] in the session's dtype.
using LookupReply = at::Tensor;

struct LookupGradient {
  std::vector<int> parts;  ///< the parts that have a gradient, ascending
  at::Tensor numbers;      ///< as LookupReply; those of other parts are ignored
  static constexpr auto kFields = std::tuple(&LookupGradient::parts, &LookupGradient::numbers);
};

struct PushRequest {
  /// kApply: adds the gradients and applies the step. kStage: adds the gradients and computes the
  /// norms. kCommit: applies a staged step.
  enum class Phase : uint8_t { kApply, kStage, kCommit };
  uint64_t session = 0;
  uint64_t number = 0;  ///< of the session's step, from 1
  Phase phase = Phase::kApply;
  double lr_factor = 1;
  double scale = 1;
  double own_norm = 0;                           ///< optim::NormArguments::own
  std::map<uint64_t, LookupGradient> gradients;  ///< by lookup
  static constexpr auto kFields = std::tuple(
      &PushRequest::session, &PushRequest::number, &PushRequest::phase, &PushRequest::lr_factor,
      &PushRequest::scale, &PushRequest::own_norm, &PushRequest::gradients);
};

}  // namespace distrain::table
