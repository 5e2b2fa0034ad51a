#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/store/file.h"

namespace distrain::data {

/// A file of training data as found before reading.
struct SourceFile {
  enum class Kind : uint8_t { kPlain, kGzip, kPipe };

  std::string path;
  Kind kind = Kind::kPlain;
  uint64_t size = 0;  ///< in bytes, as stored; 0 for a pipe
};

/// Lines of a file: those whose first byte is in [begin, end) of the (decompressed) bytes.
struct Piece {
  static constexpr uint64_t kToEnd = std::numeric_limits<uint64_t>::max();

  size_t file = 0;  ///< index of the file
  uint64_t begin = 0;
  uint64_t end = kToEnd;
};

/// Returns the file at `path`. Throws `bad_data` if there is none, or if it is a folder or empty.
SourceFile find_source(const std::string& path);
std::vector<SourceFile> find_sources(const std::vector<std::string>& paths);

/// Returns the path of one file, or the number of the files and the first path, for a message.
std::string names_of(const std::vector<SourceFile>& files);

/// Throws `bad_data` if `bytes`, which begin at byte `offset` of a text, show that the text is
/// UTF-16 or binary. As in git, a zero byte among the first 8,000 bytes marks a binary file.
void check_text(const std::string& path, uint64_t offset, std::string_view bytes);

/// Opens each file that is not a pipe, sets its kind and checks that it is a text. Returns
/// Stream::content_key().
uint64_t inspect(std::vector<SourceFile>& files);

/// Returns the pieces of one of `shards` shards, in the order of the files. Throws `bad_data` if
/// the files cannot be divided among so many shards.
std::vector<Piece> pieces_of_shard(const std::vector<SourceFile>& files, int shard, int shards);

}  // namespace distrain::data
