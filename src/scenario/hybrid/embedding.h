#pragma once

#include <deque>

#include "distrain/table/sharded_embedding.h"
#include "hybrid.h"

namespace distrain::scenario {

/// A training batch and the sum of the rows of each bag, float [bags, dim].
struct EmbeddedBatch {
  data::Batch batch;
  at::Tensor rows;
};

/// The embedding as a trainer uses it: the rows of a module, or of tables on servers (`--table`).
class Embedding {
 public:
  explicit Embedding(HybridData& data) : data_(data) {}
  virtual ~Embedding() = default;
  /// Returns the batch of a training step. Call it once for each step, in the step's context.
  virtual EmbeddedBatch embed(const job::Step& step) {
    const data::Batch batch = data_.batch(step);
    return {batch, embed(batch)};
  }
  /// Returns the sums of the rows of a batch.
  virtual at::Tensor embed(const data::Batch& batch) = 0;

 protected:
  HybridData& data_;
};

/// An embedding in tables of the layer `table`, on servers or in this process.
class ShardedTable final : public Embedding {
 public:
  /// `rows` is equal on all trainers, also if their data differ.
  ShardedTable(job::Rank& rank, const HybridOptions& options, HybridData& data, int64_t rows);
  /// Keeps all rows in this process.
  ShardedTable(const HybridOptions& options, HybridData& data);

  EmbeddedBatch embed(const job::Step& step) override;
  at::Tensor embed(const data::Batch& batch) override {
    return tables_->bags(batch.indices, batch.offsets);
  }
  const std::shared_ptr<table::ShardedEmbedding>& tables() const { return tables_; }

 private:
  struct Started {
    data::Batch batch;
    table::ShardedEmbedding::Pending rows;
  };
  const int64_t prefetch_;
  const std::shared_ptr<table::ShardedEmbedding> tables_;
  std::deque<Started> started_;  // the lookups of the next steps
};

}  // namespace distrain::scenario
