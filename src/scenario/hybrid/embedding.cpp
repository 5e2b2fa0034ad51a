#include "embedding.h"

#include <numeric>

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

EmbeddedBatch ShardedTable::embed(const job::Step& step) {
  for (int64_t ahead = std::ssize(started_); ahead <= std::min(prefetch_, step.left); ++ahead) {
    job::Step next = step;
    next.number += ahead;
    const data::Batch batch = data_.batch(next);
    started_.push_back({batch, tables_->start({{.ids = batch.indices,
                                                .offsets = batch.offsets,
                                                .pooling = table::Pooling::kSum}})});
  }
  const Started now = std::move(started_.front());
  started_.pop_front();
  return {now.batch, tables_->finish(now.rows)[0]};
}

}  // namespace distrain::scenario
