#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/corpus.h"
#include "distrain/job/schedule.h"
#include "distrain/scenario/rnn.h"

namespace distrain::scenario {

/// What the server and the other trainers have to know of the data.
struct RnnDataInfo {
  uint64_t hash = 0;        ///< of the training file's bytes
  uint64_t valid_hash = 0;  ///< of the validation file's
  int64_t words = 0;        ///< in the vocabulary
  int64_t steps_per_epoch = 0;
  int64_t valid_words = 0;  ///< 0: no validation
  static constexpr auto kFields =
      std::tuple(&RnnDataInfo::hash, &RnnDataInfo::valid_hash, &RnnDataInfo::words,
                 &RnnDataInfo::steps_per_epoch, &RnnDataInfo::valid_words);
  bool operator==(const RnnDataInfo&) const = default;
};

struct WordBatch {
  at::Tensor inputs;   ///< int64 [length, columns]
  at::Tensor targets;  ///< int64 [length · columns]: each word's next
  int64_t columns() const { return inputs.size(1); }
};

/// The text of the job, read in columns: trainer t of T has batch_size of the T · batch_size
/// columns. Random words without a file.
class RnnData {
 public:
  /// Reads the files; throws bad_data.
  explicit RnnData(const RnnOptions& options);

  RnnDataInfo info() const;
  WordBatch batch(int trainer, int64_t step) const;

  /// This trainer's share of the columns of the validation text; 0: it has none.
  int64_t valid_columns(int trainer) const;
  int64_t valid_steps() const;
  WordBatch valid_batch(int trainer, int64_t step) const;

  /// With a file only.
  const data::Vocabulary& vocabulary() const { return *vocabulary_; }

 private:
  data::TokenColumns valid_share(int trainer) const;

  const RnnOptions options_;
  std::optional<data::Vocabulary> vocabulary_;
  data::Corpus train_;
  data::Corpus valid_;
  int64_t valid_total_columns_ = 0;
};

job::Schedule::Terms schedule_terms(const RnnOptions& options, const RnnDataInfo& data);

/// What must be the same for a checkpoint to be gone on from.
job::Json must_agree(const RnnOptions& options, const RnnDataInfo& data);

}  // namespace distrain::scenario
