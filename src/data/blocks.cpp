#include "blocks.h"

#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"

namespace distrain::data {

namespace {

// Selects the sequence of random numbers for shuffling, as kShuffleSequence does for Sampler.
constexpr uint64_t kBlockSequence = 4;
// The examples of a block if blocks are not shuffled. A position does not depend on the batch size.
constexpr int64_t kOrderedBlock = 1024;
// A block ends early with this number of tokens (256 MiB), so that long examples cannot exhaust the
// memory.
constexpr size_t kMaxBlockTokens = size_t{1} << 25;

}  // namespace

Block BlockReader::next(Examples used) {
  const int64_t size = plan_.options.shuffle_buffer;
  Block block{.examples = std::move(used)};
  block.examples.clear();
  block.begin = next_;
  block.counted = std::exchange(next_.used, 0) > 0;
  while (std::ssize(block.examples.labels) < (size > 0 ? size : kOrderedBlock) &&
         block.examples.tokens.size() < kMaxBlockTokens) {
    const auto line = next_line();
    if (!line) {
      block.last = true;
      break;
    }
    try {
      parser_.parse(*line, block.examples);
    } catch (const BadRow& row) {
      add_bad_row(block, row);
    }
  }
  if (lines_) {
    const Piece& piece = plan_.pieces[static_cast<size_t>(next_.piece)];
    next_.offset = static_cast<int64_t>(lines_->offset() - piece.begin);
  }
  ++next_.block;
  block.end = next_;
  examples_ += std::ssize(block.examples.labels);
  if (block.last && from_begin_ && examples_ == 0) check_any_example();
  shuffle(block);
  if (block.begin.used > block.size()) {
    base::bad_data(
        names_of(plan_.files) + ": not the data of the checkpoint: a block has " +
        fmt::format("{} examples, of which {} were used", block.size(), block.begin.used));
  }
  return block;
}

// Returns nullopt at the end of the last piece.
std::optional<std::string_view> BlockReader::next_line() {
  for (; next_.piece < std::ssize(plan_.pieces); ++next_.piece, next_.offset = 0) {
    const Piece& piece = plan_.pieces[static_cast<size_t>(next_.piece)];
    if (!lines_) {
      lines_.emplace(plan_.files[piece.file], piece.begin + static_cast<uint64_t>(next_.offset),
                     piece.end, waiting_);
    }
    if (auto line = lines_->next()) return line;
    lines_.reset();
  }
  return std::nullopt;
}

// Finds the place of the first bad row only, because that may take a pass over the file.
void BlockReader::add_bad_row(Block& block, const BadRow& row) {
  const bool stop = plan_.options.bad_rows == BadRows::kStop;
  if (stop || (first_bad_row_.empty() && !block.counted)) {
    first_bad_row_ = block.first_bad_row = lines_->place(row.at) + ": " + row.reason;
  }
  if (stop) base::bad_data(first_bad_row_);
  ++block.bad_rows;
}

void BlockReader::shuffle(Block& block) const {
  block.order.resize(block.examples.size());
  std::iota(block.order.begin(), block.order.end(), 0U);
  if (plan_.options.shuffle_buffer == 0) return;
  base::Random random({plan_.options.seed, kBlockSequence, static_cast<uint64_t>(next_.epoch),
                       static_cast<uint64_t>(plan_.options.shard),
                       static_cast<uint64_t>(block.begin.block)});
  for (size_t left = block.order.size(); left > 1; --left) {
    std::swap(block.order[left - 1], block.order[random.below(left)]);
  }
}

// Called for a shard without examples. Throws if the other shards have none either.
void BlockReader::check_any_example() {
  Examples examples;
  for (size_t i = 0; plan_.options.shards > 1 && i < plan_.files.size(); ++i) {
    LineReader lines(plan_.files[i], 0, Piece::kToEnd, waiting_);
    while (const auto line = lines.next()) {
      try {
        if (parser_.parse(*line, examples)) return;
      } catch (const BadRow& row) {
        if (first_bad_row_.empty()) first_bad_row_ = lines.place(row.at) + ": " + row.reason;
      }
    }
  }
  base::bad_data(names_of(plan_.files) + ": no example" +
                 (first_bad_row_.empty() ? "" : "; the first bad row is " + first_bad_row_));
}

}  // namespace distrain::data
