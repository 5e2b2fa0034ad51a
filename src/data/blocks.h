#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/data/stream.h"
#include "distrain/store/file.h"
#include "example_parser.h"
#include "lines.h"
#include "source_files.h"

namespace distrain::data {

/// The facts of a stream that do not change.
struct Plan {
  StreamOptions options;
  std::vector<SourceFile> files;
  std::vector<Piece> pieces;  // of the shard
};

/// Consecutive examples of a shard, and the order in which they are returned.
struct Block {
  StreamPosition begin, end;  // `end` is the beginning of the next block
  Examples examples;
  std::vector<uint32_t> order;  // of the examples
  bool last = false;            // of the epoch
  bool counted = false;         // in Stream::Counts
  int64_t bad_rows = 0;
  std::string first_bad_row;

  int64_t size() const { return std::ssize(order); }
};

/// Reads the blocks of an epoch one after the other. Used by the thread of a stream.
class BlockReader {
 public:
  BlockReader(const Plan& plan, const store::Interrupt& interrupt, const StreamPosition& position)
      : plan_(plan),
        waiting_{&interrupt, plan.options.pipe_writer_limit},
        parser_(plan.options.format, plan.options.vocabulary),
        next_(position),
        from_begin_(position == StreamPosition{.epoch = position.epoch}) {}

  /// Returns the next block, in the memory of `used` examples, which are removed. Call it until it
  /// has returned the last block. Throws as Stream::ready().
  Block next(Examples used);

 private:
  std::optional<std::string_view> next_line();
  void add_bad_row(Block& block, const BadRow& row);
  void shuffle(Block& block) const;
  void check_any_example();

  const Plan& plan_;
  const store::InputFile::Waiting waiting_;
  ExampleParser parser_;
  StreamPosition next_;              // the beginning of the next block
  bool from_begin_;                  // reading has started at the beginning of the epoch
  std::optional<LineReader> lines_;  // of the piece next_.piece, if it is open
  int64_t examples_ = 0;             // of the blocks so far
  std::string first_bad_row_;
};

}  // namespace distrain::data
