#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <tuple>

#include "distrain/data/batches.h"

namespace distrain::data {

/// A place in a shard of streamed examples. A Source that begins there hands out the batches that
/// it would have handed out next.
struct StreamPosition {
  int64_t epoch = 1;   ///< number of the pass over the shard, from 1
  int64_t piece = 0;   ///< index of the file, or part of a file, in the shard
  int64_t offset = 0;  ///< first byte of the current block in the piece, after decompression
  int64_t block = 0;   ///< number of the block in this pass
  int64_t used = 0;    ///< examples of the block, in shuffled order, that were handed out
  bool operator==(const StreamPosition&) const = default;
  static constexpr auto kFields =
      std::tuple(&StreamPosition::epoch, &StreamPosition::piece, &StreamPosition::offset,
                 &StreamPosition::block, &StreamPosition::used);
};

/// A shard's examples, which arrive as a stream of unknown length.
///
///   source.begin({.epoch = 1});
///   while (source.ready() > 0) train(source.next());
///
/// Used by one thread at a time. ready() and next() throw `bad_data` if the data is not valid.
class Source {
 public:
  /// Totals since the object was made.
  struct Counts {
    int64_t examples = 0;  ///< examples of all batches
    int64_t bad_rows = 0;  ///< rows that were skipped
    std::string first_bad_row;
    int64_t dropped_tokens = 0;  ///< words that the vocabulary does not have
    double waited_s = 0;         ///< time for which ready() and next() waited for data
  };

  virtual ~Source() = default;
  /// Moves to `position`, which is the start of an epoch or was returned by position().
  virtual void begin(const StreamPosition& position) = 0;
  /// Waits until the next batch is there, the pass over the data has ended or reading has failed,
  /// but no longer than `limit`. Returns true if ready() would return or throw at once.
  virtual bool await(std::chrono::milliseconds limit) = 0;
  /// Returns the number of batches that are certain to follow, or 0 if the pass over the data has
  /// ended. Waits until either is known.
  virtual int64_t ready() = 0;
  /// Returns the next batch, the last of which may be short. Call it only if ready() is not 0.
  virtual Batch next() = 0;
  /// Returns the position after the last batch.
  virtual StreamPosition position() const = 0;
  /// Returns true if there is only one pass, because the data comes from a pipe.
  virtual bool has_one_pass() const = 0;
  virtual Counts counts() const = 0;
};

}  // namespace distrain::data
