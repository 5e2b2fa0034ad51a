#pragma once

#include <deque>

#include "distrain/table/sharded_embedding.h"
#include "hybrid.h"

namespace distrain::scenario {

/// A batch of a training step and the sum of the rows of each bag, float [bags, dim].
struct EmbeddedBatch {
  data::Batch batch;
  at::Tensor rows;
  double weight = 1;  ///< share of the batch in the step's examples

  /// Returns a part of a step's batch, without rows.
  static EmbeddedBatch part_of(const data::Batch& step, const job::Share& part);
  /// Returns the batch's part of the step's mean loss. `forward` maps rows to scores.
  at::Tensor loss(const HybridOptions& options, c10::Device device,
                  const std::function<at::Tensor(const at::Tensor&)>& forward) const;
};

/// The embedding as a trainer uses it: the rows of a module, or of tables on servers (`--table`).
class Embedding {
 public:
  explicit Embedding(HybridData& data) : data_(data) {}
  virtual ~Embedding() = default;
  /// Returns a part of a training step. Call it once for each part, in the part's context.
  virtual EmbeddedBatch embed(const job::Step& step, const job::Share& part) {
    if (part.index == 0) step_ = data_.batch(step);
    EmbeddedBatch now = EmbeddedBatch::part_of(step_, part);
    now.rows = embed(now.batch);
    return now;
  }
  /// Returns the sums of the rows of a batch.
  virtual at::Tensor embed(const data::Batch& batch) = 0;

 protected:
  HybridData& data_;

 private:
  data::Batch step_;  // all parts of the current step
};

/// An embedding in tables of the layer `table`, on servers or in this process.
class ShardedTable final : public Embedding {
 public:
  /// `rows` is equal on all trainers, also if their data differ.
  ShardedTable(job::Rank& rank, const HybridOptions& options, HybridData& data, int64_t rows);
  /// Keeps all rows in this process.
  ShardedTable(const HybridOptions& options, HybridData& data);

  EmbeddedBatch embed(const job::Step& step, const job::Share& part) override;
  at::Tensor embed(const data::Batch& batch) override {
    return tables_->bags(batch.indices, batch.offsets);
  }
  const std::shared_ptr<table::ShardedEmbedding>& tables() const { return tables_; }

 private:
  struct Started {
    EmbeddedBatch part;
    table::ShardedEmbedding::Pending rows;
  };
  const int64_t prefetch_;
  const std::shared_ptr<table::ShardedEmbedding> tables_;
  std::deque<Started> started_;  // the lookups of this step's other parts and of the next steps
};

}  // namespace distrain::scenario
