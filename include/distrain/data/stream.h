#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "distrain/data/source.h"
#include "distrain/data/text.h"

namespace distrain::data {

// Reads training data that may be larger than memory, while the job trains on it.
//
//   Stream stream({.paths = expand_paths({"day_*.gz"}), .format = Format::kCriteo, …});
//   stream.begin({.epoch = 1});
//   while (stream.ready() > 0) train(stream.next());
//
// Order: a shard reads its pieces of the files one after the other and divides their examples into
// blocks of `shuffle_buffer` examples. Fisher-Yates shuffles each block by a `base::Random` keyed
// by seed, epoch, shard and block. A batch is the next `batch_size` examples, also across blocks.
// So the order depends on the files, the seed, the epoch, the number of shards and the size of the
// blocks, and never on time. A position in this order is the beginning of a block and a number of
// examples; a resumed stream reads the block again.
//
// Shards: the bytes of all plain files, one file after the other, are divided into `shards` equal
// ranges. A line belongs to the shard that has the line's first byte. A gzip file cannot be
// divided: the largest goes first to the shard that has the fewest bytes so far, then the next
// largest. A pipe, or "-" for the standard input, can be read by one shard only.

enum class Format : uint8_t {
  kFastText,  ///< `__label__NAME token token …`, with exactly one label; see read_fast_text()
  /// 40 fields separated by tabs: a label of 0 or 1, 13 integers and 26 categories, which are
  /// hexadecimal numbers in Criteo's files, but may be any text. All but the label may be empty.
  kCriteo,
};

/// The reaction to a line that is not an example: too few or too many fields, no label or several,
/// an unknown label, or a malformed number. The message is `FILE:LINE:COLUMN: reason`.
enum class BadRows : uint8_t {
  kStop,  ///< the stream fails with `bad_data`
  kSkip,  ///< the stream counts the line and continues
};

/// Splits the value of an option: by commas, unless it is the name of a file.
std::vector<std::string> split_paths(const std::string& text);

/// Returns true if `path` is "-" or names a pipe or another file without an end.
bool is_pipe(const std::string& path);

/// Returns true if `path` is a regular file that is not gzip and has fewer than `bytes` bytes.
bool fits_in_memory(const std::string& path, int64_t bytes);

/// Returns true if each of `shards` shards can read a part of the files: see Stream.
bool can_divide(const std::vector<std::string>& paths, int shards);

/// Returns the files that `patterns` (glob(3)) match: pattern by pattern, and sorted by bytes
/// within a pattern. A pattern that is itself the name of a file, or "-", is not expanded. Throws
/// `bad_data` if a pattern matches nothing, or if a match is a folder or an empty file.
std::vector<std::string> expand_paths(const std::vector<std::string>& patterns);

/// Returns the format of the first line of `path` that is not empty: kFastText if it has a
/// `__label__` token, kCriteo if it has 40 fields separated by tabs and the label 0 or 1. Throws
/// `bad_data` if it is neither, or if the file is a pipe, which can be read only once.
Format detect_format(const std::string& path);

/// Returns the vocabulary of the files in one pass, with the words and labels that read_fast_text()
/// finds in the concatenated files. With `hash_bits` above 0, it has no words. The labels of
/// kCriteo are "0" and "1", so no file is read. Stops after `max_examples` examples. Throws
/// `bad_data` as read_fast_text() does, or for a pipe, which can be read only once; `invalid` if
/// `hash_bits` is not in [0, 62], or is 0 for kCriteo.
TextVocabulary scan_vocabulary(const std::vector<std::string>& paths, Format format, int hash_bits,
                               BadRows bad_rows = BadRows::kStop,
                               int64_t max_examples = std::numeric_limits<int64_t>::max());

/// Reads all examples of a file into memory. Throws as read_fast_text() and Stream::ready(). Only
/// fastText may have examples without a label.
TextDataset read_examples(const std::string& path, Format format,
                          std::shared_ptr<const TextVocabulary> vocabulary,
                          Labels labels = Labels::kAll);

struct StreamOptions {
  std::vector<std::string> paths;  ///< as returned by expand_paths()
  Format format = Format::kFastText;
  int shard = 0;  ///< in [0, shards)
  int shards = 1;
  int64_t batch_size = 32;
  /// Number of epochs that are expected. Between them, unless there is a pipe, reading goes on with
  /// the next epoch, so that its first batch is there when begin() asks for it.
  int64_t epochs = 1;
  int64_t shuffle_buffer = 65536;  ///< examples of a block; 0: keep the order of the files
  uint64_t seed = 1;
  BadRows bad_rows = BadRows::kStop;
  /// The labels, and the words or hash_bits, of all shards. kCriteo needs hash_bits above 0.
  std::shared_ptr<const TextVocabulary> vocabulary{};
  /// How long a named pipe (FIFO) may have no writer before reading fails with `bad_data`.
  std::chrono::milliseconds pipe_writer_limit{5000};
};

/// One shard of the examples of some files. A thread of the stream reads them. It reads at most one
/// block (or, if a block is smaller than a batch, one batch) ahead of the block that is in use.
class Stream final : public Source {
 public:
  /// Checks the options and the files, and selects the shard's pieces. Starts no reading. Throws
  /// `bad_data` if a file cannot be opened, is a folder, is empty or is no text, if a pipe would be
  /// read by several shards, or if there are too few gzip files for the shards. Throws `invalid` if
  /// an option is out of range.
  explicit Stream(StreamOptions options);
  /// Ends the reading thread, even while it waits for a pipe.
  ~Stream() override;

  /// Starts to read from `position`: StreamPosition{epoch} for a new epoch, or a position() of a
  /// stream with the same options except `batch_size` and `epochs`. Returns at once. Stops a
  /// current reading, unless that has gone on with this epoch after the end of the epoch before.
  /// Throws `bad_data` if there is no such position.
  void begin(const StreamPosition& position) override;

  /// If reading has failed, throws the error once all batches of the blocks before the failure have
  /// been returned: `bad_data` for a bad row, for a damaged or changed file, for a named pipe
  /// without a writer, or if the files have no example at all.
  int64_t ready() override;

  /// Throws as ready(), and `invalid` at the end of the epoch.
  ///
  /// A kCriteo example is a bag of 39 indices, in the order of its fields: the index of `I1:BUCKET`
  /// to `I13:BUCKET` and of `C1:TEXT` to `C26:TEXT`, which are those that read_fast_text() gives
  /// these words with the same hash_bits. The bucket of a number x is floor(ln(1 + x)²) if x ≥ 0,
  /// `-` if x < 0, and empty for an empty field. Batch::numbers has ln(1 + max(x, 0)), or 0 for an
  /// empty field. So `indices.view({n, 39}).narrow(1, 13, 26)` are the categories.
  Batch next() override;

  bool await(std::chrono::milliseconds limit) override;
  bool has_one_pass() const override;

  /// After ready() has returned 0, returns the end of the epoch.
  StreamPosition position() const override;

  /// Returns the totals since the constructor. A block's bad rows and dropped tokens count when its
  /// first example is due, so that the counts of a stopped and of its resumed stream add up.
  Counts counts() const override;

  /// Returns a hash of facts that must be the same for all trainers, whatever the paths are: the
  /// number of files, their sizes, and the first 64 KiB of each file that is not a pipe.
  uint64_t content_key() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace distrain::data
