// Shared helpers of the tests of streams.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distrain/data/stream.h"
#include "support/files.h"

namespace distrain::data {

using Ints = std::vector<int64_t>;
using Strings = std::vector<std::string>;

/// Returns lines of fastText with the numbers [first, last) as words.
inline std::string numbered(int first, int last, const std::string& line_end = "\n") {
  std::string text;
  for (int i = first; i < last; ++i) {
    text += "__label__" + std::string(i % 3 == 0 ? "a" : "b") + " " + std::to_string(i);
    text += std::string(static_cast<size_t>(i * 7 % 30), 'x') + " common" + line_end;
  }
  return text;
}

inline StreamOptions options_of(Strings paths, int64_t batch_size = 4, int64_t shuffle_buffer = 8) {
  StreamOptions options;
  options.vocabulary = std::make_shared<const TextVocabulary>(
      scan_vocabulary(paths, Format::kFastText, 0, BadRows::kSkip));
  options.paths = std::move(paths);
  options.batch_size = batch_size;
  options.shuffle_buffer = shuffle_buffer;
  return options;
}

struct Read {
  std::vector<Ints> examples;             // the label and the tokens of each
  std::vector<int64_t> sizes;             // of the batches
  std::vector<StreamPosition> positions;  // before each batch, and at the end
};

/// Reads the rest of the epoch.
inline Read read_rest(Source& stream) {
  Read read;
  read.positions.push_back(stream.position());
  while (stream.ready() > 0) {
    const Batch batch = stream.next();
    const Ints indices = testing::ints(batch.indices), targets = testing::ints(batch.targets);
    Ints offsets = testing::ints(batch.offsets);
    offsets.push_back(std::ssize(indices));
    for (size_t i = 0; i < targets.size(); ++i) {
      Ints& example = read.examples.emplace_back(1, targets[i]);
      example.insert(example.end(), indices.begin() + offsets[i], indices.begin() + offsets[i + 1]);
    }
    read.sizes.push_back(batch.size());
    read.positions.push_back(stream.position());
  }
  return read;
}

inline Read read_epoch(const StreamOptions& options, int64_t epoch = 1) {
  Stream stream(options);
  stream.begin({.epoch = epoch});
  return read_rest(stream);
}

inline std::vector<Ints> sorted(std::vector<Ints> examples) {
  std::ranges::sort(examples);
  return examples;
}

/// Returns the examples of the concatenated files as read_fast_text() reads them.
inline std::vector<Ints> in_memory(const std::string& text, const StreamOptions& options) {
  const TextDataset data = parse_fast_text(text, "f", options.vocabulary);
  std::vector<Ints> examples;
  for (int64_t i = 0; i < data.size(); ++i) {
    const auto at = static_cast<size_t>(i);
    Ints& example = examples.emplace_back(1, data.labels[at]);
    example.insert(example.end(), data.tokens.begin() + data.offsets[at],
                   data.tokens.begin() + data.offsets[at + 1]);
  }
  return examples;
}

}  // namespace distrain::data
