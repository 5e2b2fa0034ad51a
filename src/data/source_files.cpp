#include "source_files.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <new>
#include <span>

#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>

#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "distrain/data/stream.h"
#include "distrain/store/hash.h"

namespace distrain::data {

namespace {

constexpr uint64_t kHashedBytes = 64 * 1024;  // at the beginning of each file

// Returns the paths that match `pattern`, sorted by bytes.
std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  const int error = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  if (error == GLOB_NOSPACE) throw std::bad_alloc();
  std::ranges::sort(paths);
  return paths;
}

uint64_t plain_bytes(const SourceFile& file) {
  return file.kind == SourceFile::Kind::kPlain ? file.size : 0;
}

// Returns the shard that reads each gzip file, and -1 for other files. `bytes` has the number of
// bytes of plain files that each shard reads.
std::vector<int> assign_gzip_files(const std::vector<SourceFile>& files,
                                   std::vector<uint64_t> bytes) {
  std::vector<size_t> largest_first;
  for (size_t i = 0; i < files.size(); ++i) {
    if (files[i].kind == SourceFile::Kind::kGzip) largest_first.push_back(i);
  }
  std::ranges::stable_sort(largest_first, std::greater(), [&](size_t i) { return files[i].size; });
  std::vector<int> shards(files.size(), -1);
  for (const size_t i : largest_first) {
    const auto least = std::ranges::min_element(bytes);  // the first of equal ones
    *least += files[i].size;
    shards[i] = static_cast<int>(least - bytes.begin());
  }
  if (!largest_first.empty() && std::ranges::count(bytes, uint64_t{0}) > 0) {
    base::bad_data(
        fmt::format("{} {} too few for {} trainers, because a gzip file cannot be divided: give at "
                    "least as many files as trainers, fewer --trainers, or --data-from rank0",
                    files.size(), files.size() == 1 ? "file is" : "files are", bytes.size()));
  }
  return shards;
}

}  // namespace

SourceFile find_source(const std::string& path) {
  if (path == "-") return {path, SourceFile::Kind::kPipe, 0};
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) store::fail_open(path);
  if (S_ISDIR(status.st_mode)) {
    base::bad_data(fmt::format("{0}: a folder; give its files, for example as {0}/*", path));
  }
  if (!S_ISREG(status.st_mode)) return {path, SourceFile::Kind::kPipe, 0};
  if (status.st_size == 0) base::bad_data(path + ": an empty file");
  return {path, SourceFile::Kind::kPlain, static_cast<uint64_t>(status.st_size)};
}

std::vector<SourceFile> find_sources(const std::vector<std::string>& paths) {
  std::vector<SourceFile> files;
  for (const std::string& path : paths) files.push_back(find_source(path));
  return files;
}

std::vector<std::string> split_paths(const std::string& text) {
  struct stat status {};
  if (::stat(text.c_str(), &status) == 0) return {text};
  std::vector<std::string> paths;
  for (const std::string_view path : base::split(text, ',')) paths.emplace_back(path);
  return paths;
}

bool is_pipe(const std::string& path) {
  struct stat status {};
  if (path == "-") return true;
  return ::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

bool fits_in_memory(const std::string& path, int64_t bytes) {
  std::vector<SourceFile> file{find_source(path)};
  if (file[0].kind == SourceFile::Kind::kPipe) return false;
  inspect(file);
  return file[0].kind == SourceFile::Kind::kPlain && file[0].size < static_cast<uint64_t>(bytes);
}

bool can_divide(const std::vector<std::string>& paths, int shards) {
  if (shards == 1) return true;
  std::vector<SourceFile> files = find_sources(paths);
  const auto count = [&](SourceFile::Kind kind) {
    return std::ranges::count(files, kind, &SourceFile::kind);
  };
  if (count(SourceFile::Kind::kPipe) > 0) return false;
  inspect(files);
  return count(SourceFile::Kind::kPlain) > 0 || count(SourceFile::Kind::kGzip) >= shards;
}

std::vector<std::string> expand_paths(const std::vector<std::string>& patterns) {
  std::vector<std::string> paths;
  for (const std::string& pattern : patterns) {
    struct stat status {};
    const bool is_name = pattern == "-" || ::stat(pattern.c_str(), &status) == 0;
    const std::vector<std::string> found = is_name ? std::vector{pattern} : matches(pattern);
    if (found.empty()) {
      if (pattern.find_first_of("*?[") == std::string::npos) find_source(pattern);  // throws
      base::bad_data(pattern + ": no file matches this pattern");
    }
    for (const std::string& path : found) paths.push_back(find_source(path).path);
  }
  return paths;
}

std::string names_of(const std::vector<SourceFile>& files) {
  if (files.size() == 1) return files[0].path;
  return fmt::format("{} files, the first is {}", files.size(), files[0].path);
}

void check_text(const std::string& path, uint64_t offset, std::string_view bytes) {
  constexpr uint64_t kLooked = 8000;
  if (offset == 0 && (bytes.starts_with("\xFF\xFE") || bytes.starts_with("\xFE\xFF"))) {
    base::bad_data(path + ": UTF-16 text: convert it to UTF-8 first with iconv -f UTF-16 -t UTF-8");
  }
  const size_t zero = bytes.substr(0, kLooked - std::min(kLooked, offset)).find('\0');
  if (zero == std::string_view::npos) return;
  base::bad_data(
      fmt::format("{}: a binary file, not text: byte {} is zero", path, offset + zero + 1));
}

uint64_t inspect(std::vector<SourceFile>& files) {
  store::ContentHasher hasher;
  const auto add_number = [&](uint64_t number) {
    hasher.add(std::bit_cast<std::array<uint8_t, 8>>(number));
  };
  add_number(files.size());
  std::vector<uint8_t> begin(kHashedBytes);
  for (SourceFile& file : files) {
    add_number(file.size);
    if (file.kind == SourceFile::Kind::kPipe) continue;
    const store::InputFile input(file.path, store::InputFile::Kind::kRegular);
    const size_t size = input.read(begin.data(), begin.size());
    hasher.add(std::span(begin).first(size));
    const std::string_view text(reinterpret_cast<const char*>(begin.data()), size);
    if (text.starts_with("\x1F\x8B")) {
      file.kind = SourceFile::Kind::kGzip;
    } else {
      check_text(file.path, 0, text);
    }
  }
  return hasher.value();
}

std::vector<Piece> pieces_of_shard(const std::vector<SourceFile>& files, int shard, int shards) {
  const auto count = static_cast<uint64_t>(shards);
  uint64_t total = 0;
  for (const SourceFile& file : files) {
    total += plain_bytes(file);
    if (file.kind == SourceFile::Kind::kPipe && shards > 1) {
      base::bad_data((file.path == "-" ? "the standard input" : file.path + ": a pipe") +
                     " can be read by one process only: give files, or --data-from rank0");
    }
  }
  const auto cut = [&](uint64_t k) { return total / count * k + total % count * k / count; };
  std::vector<uint64_t> bytes;
  for (uint64_t k = 0; k < count; ++k) bytes.push_back(cut(k + 1) - cut(k));
  const std::vector<int> shard_of = assign_gzip_files(files, std::move(bytes));

  const uint64_t first = cut(static_cast<uint64_t>(shard));
  const uint64_t last = cut(static_cast<uint64_t>(shard) + 1);
  std::vector<Piece> pieces;
  uint64_t start = 0;  // of the file, in the concatenation of the plain files
  for (size_t i = 0; i < files.size(); ++i) {
    if (files[i].kind == SourceFile::Kind::kPipe || shard_of[i] == shard) pieces.push_back({i});
    const uint64_t end = start + plain_bytes(files[i]);
    const uint64_t from = std::max(first, start), to = std::min(last, end);
    if (from < to) pieces.push_back({i, from - start, to - start});
    start = end;
  }
  return pieces;
}

}  // namespace distrain::data
