#include "distrain/data/cifar.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <vector>

#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/store/file.h"

namespace distrain::data {
namespace {

constexpr int64_t kSide = 32;
constexpr int64_t kChannels = 3;
constexpr uint8_t kClasses = 10;
constexpr size_t kPixels = kChannels * kSide * kSide;
constexpr size_t kRecord = 1 + kPixels;
constexpr size_t kChunk = 1024 * kRecord;
constexpr std::array kTrainingFiles = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                                       "data_batch_4.bin", "data_batch_5.bin"};

// Returns the path in `folder` or in the folder of the unpacked archive; empty if missing.
std::string find_file(const std::string& folder, const std::string& name) {
  for (const char* between : {"/", "/cifar-10-batches-bin/"}) {
    std::string path = folder + between + name;
    if (access(path.c_str(), F_OK) == 0) return path;
  }
  return "";
}

void append_file(const std::string& path, store::InputFile::Kind kind, store::ContentHasher& hasher,
                 ImageSet& set) {
  const int64_t before = set.count;
  const uint64_t left = kMaxImageBytes - set.pixels.size() - set.labels.size();
  store::GzipReader reader(path, {left, "that are left of the 8 GiB that are read"}, kind);
  std::vector<uint8_t> chunk;
  uint64_t total = 0;
  do {
    chunk.resize(kChunk);
    chunk.resize(reader.read(chunk.data(), kChunk));
    total += chunk.size();
    if (chunk.size() % kRecord != 0) {
      base::bad_data(path + ": " + std::to_string(total) +
                     " bytes are no whole number of records of " + std::to_string(kRecord));
    }
    for (auto at = chunk.begin(); at != chunk.end(); at += kRecord) {
      if (*at >= kClasses) {
        base::bad_data(path + ": record " + std::to_string(set.count - before) + " has the label " +
                       std::to_string(*at) + ", not one of 0 to 9");
      }
      set.labels.push_back(*at);
      set.pixels.insert(set.pixels.end(), at + 1, at + kRecord);
      ++set.count;
    }
    hasher.add(chunk);
  } while (chunk.size() == kChunk);
  if (set.count == before) base::bad_data(path + ": no image in this file");
}

ImageSet read_files(const std::vector<std::string>& paths,
                    store::InputFile::Kind kind = store::InputFile::Kind::kRegular) {
  ImageSet set;
  set.channels = kChannels;
  set.rows = kSide;
  set.columns = kSide;
  store::ContentHasher hasher;
  for (const std::string& path : paths) {
    store::with_memory_for(path, [&] { append_file(path, kind, hasher, set); });
  }
  set.content_hash = hasher.value();
  return set;
}

}  // namespace

bool has_cifar10(const std::string& folder) {
  return std::ranges::any_of(kTrainingFiles,
                             [&](const char* name) { return !find_file(folder, name).empty(); });
}

ImageFolder read_cifar10(const std::string& folder) {
  std::vector<std::string> paths;
  for (const std::string name : kTrainingFiles) {
    paths.push_back(find_file(folder, name));
    if (paths.back().empty()) base::bad_data(folder + ": no " + name + " in this folder");
  }
  ImageFolder result;
  result.train = read_files(paths);
  const std::string test = find_file(folder, "test_batch.bin");
  if (!test.empty()) result.test = read_files({test});
  return result;
}

ImageSet read_cifar10_images(const std::string& path) {
  const std::string test = find_file(path, "test_batch.bin");
  if (test.empty() && std::filesystem::is_directory(path)) {
    base::bad_data(path + ": no test_batch.bin in this folder");
  }
  return read_files({test.empty() ? path : test}, store::InputFile::Kind::kAny);
}

}  // namespace distrain::data
