#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "distrain/data/batches.h"
#include "distrain/data/idx.h"
#include "distrain/job/schedule.h"
#include "distrain/job/train_log.h"
#include "distrain/scenario/ps.h"

namespace distrain::scenario {

/// What the server and the other trainers have to know of the data.
struct PsDataInfo {
  uint64_t hash = 0;       ///< of the training files' contents
  uint64_t test_hash = 0;  ///< of the test files'
  int64_t examples = 0;
  int64_t test_examples = 0;
  double mean = 0;
  double std = 1;
  static constexpr auto kFields =
      std::tuple(&PsDataInfo::hash, &PsDataInfo::test_hash, &PsDataInfo::examples,
                 &PsDataInfo::test_examples, &PsDataInfo::mean, &PsDataInfo::std);
  bool operator==(const PsDataInfo&) const = default;
};

struct ImageBatch {
  at::Tensor images;   ///< float [n, 1, 28, 28], normalised
  at::Tensor targets;  ///< int64 [n]
};

/// The batches of the job, from IDX files of 28 × 28 images in ten classes.
class PsData {
 public:
  /// Reads the files; throws bad_data.
  explicit PsData(const PsOptions& options);

  PsDataInfo info() const;
  ImageBatch batch(const job::Task& task);
  /// Test examples [first, last).
  ImageBatch test_batch(int64_t first, int64_t last) const;
  /// As in training, so that an evaluation takes no more memory than that.
  int64_t test_batch_size() const;

 private:
  ImageBatch gather(const data::ImageSet& set, std::span<const int64_t> examples) const;

  const PsOptions options_;
  data::ImageFolder files_;
  int64_t examples_ = 0;
  // Of the epoch asked for last, by shard.
  std::map<int, data::EpochSampler> samplers_;
  int64_t samplers_epoch_ = -1;
};

/// The random numbers of one training step.
std::optional<uint64_t> dropout_key(const PsOptions& options, const job::Task& task);

job::Schedule::Terms schedule_terms(const PsOptions& options, const PsDataInfo& data);

/// What must be the same for a checkpoint to be gone on from.
job::Json must_agree(const PsOptions& options, const PsDataInfo& data);

/// Trainer `trainer`'s share of the test examples; `forward` gives a batch's log-probabilities.
job::Evaluation evaluate_share(const PsData& data, int trainer, int trainers,
                               const std::function<at::Tensor(const at::Tensor& images)>& forward);

}  // namespace distrain::scenario
