#include "embedding.h"

#include <numeric>

#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

namespace {

/// Returns the options of the only table.
std::vector<table::TableOptions> table_options(const HybridOptions& options, int64_t rows) {
  constexpr int64_t kDrawnByTorch = int64_t{1} << 24;  // numbers, of which each server has a copy
  table::TableOptions table{.name = "embedding", .dim = options.embedding_dim};
  if (!options.hashes_words()) table.num_rows = rows;
  table.seed = options.seed;
  table.range = options.embedding_range();
  table.drawn_by_torch = table.num_rows > 0 && table.num_rows <= kDrawnByTorch / table.dim;
  table.max_rows = options.max_rows;
  table.optimizer = optim::to_fields(options.rule().options);
  table.optimizer.name = options.optimizer;
  return {table};
}

std::vector<int> servers_of(const job::Rank& rank) {
  const job::Roles::Role& role = rank.roles().named("ps");
  std::vector<int> ranks(static_cast<size_t>(role.count));
  std::iota(ranks.begin(), ranks.end(), role.first);
  return ranks;
}

at::ScalarType wire_dtype(const std::string& name) {
  return name == "bf16" ? at::kBFloat16 : name == "fp16" ? at::kHalf : at::kFloat;
}

}  // namespace

EmbeddedBatch EmbeddedBatch::part_of(const data::Batch& step, const job::Share& part) {
  if (part.count == 1) return {step, {}};
  const data::Batch batch = step.part(part.first(step.size()), part.end(step.size()));
  return {batch, {}, step.size() > 0 ? static_cast<double>(batch.size()) / step.size() : 1};
}

at::Tensor EmbeddedBatch::loss(const HybridOptions& options, c10::Device device,
                               const std::function<at::Tensor(const at::Tensor&)>& forward) const {
  const at::Tensor targets = rpc::to_device(batch.targets, device),
                   here = rpc::to_device(rows, device);
  const at::Tensor scores = base::traced("forward", [&] { return forward(here); });
  const at::Tensor mean = base::traced("loss", [&] { return options.loss(scores, targets); });
  return weight == 1 ? mean : mean * weight;
}

ShardedTable::ShardedTable(job::Rank& rank, const HybridOptions& options, HybridData& data,
                           int64_t rows)
    : Embedding(data),
      prefetch_(options.prefetch),
      tables_(std::make_shared<table::ShardedEmbedding>(
          rank.agent(), servers_of(rank), table_options(options, rows),
          options.sharing(rank.index()),
          table::LookupSettings{.wire_dtype = wire_dtype(options.wire_dtype)})) {}

ShardedTable::ShardedTable(const HybridOptions& options, HybridData& data)
    : Embedding(data),
      prefetch_(0),
      tables_(std::make_shared<table::ShardedEmbedding>(std::make_shared<table::TableServer>(),
                                                        table_options(options, data.rows()))) {}

EmbeddedBatch ShardedTable::embed(const job::Step& step, const job::Share& part) {
  const int64_t most = part.index == 0 ? std::min(prefetch_, step.left) : -1;
  for (int64_t ahead = std::ssize(started_) / part.count; ahead <= most; ++ahead) {
    job::Step next = step;
    next.number += ahead;
    const data::Batch whole = data_.batch(next);
    for (job::Share its{0, part.count}; its.index < its.count; ++its.index) {
      const EmbeddedBatch now = EmbeddedBatch::part_of(whole, its);
      started_.push_back({now, tables_->start({{.ids = now.batch.indices,
                                                .offsets = now.batch.offsets,
                                                .pooling = table::Pooling::kSum}})});
    }
  }
  Started now = std::move(started_.front());
  started_.pop_front();
  now.part.rows = tables_->finish(now.rows)[0];
  return now.part;
}

}  // namespace distrain::scenario
