// Tests that readers stop at a limit if a small file decompresses to, or claims, too much data.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/resource.h>

#include "distrain/data/images.h"
#include "distrain/store/file.h"
#include "distrain/store/safetensors.h"
#include "gzip.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
namespace {

constexpr size_t kGiB = size_t{1} << 30;

// Returns a gzip file of about 1 MiB that holds `begin` and, in 256 gzip members, 1 GiB of zeros.
std::string bomb(const std::string& begin) {
  static const std::string zeros = gzip(std::string(kGiB / 256, '\0'));
  std::string text = begin.empty() ? "" : gzip(begin);
  for (int i = 0; i < 256; ++i) text += zeros;
  REQUIRE(text.size() < size_t{2} << 20);
  return text;
}

std::string idx_header(const std::vector<uint32_t>& sizes) {
  std::string header = big_endian(0x800 + static_cast<uint32_t>(sizes.size()));
  for (const uint32_t size : sizes) header += big_endian(size);
  return header;
}

/// Returns the peak resident memory of this process in bytes.
size_t most_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<size_t>(usage.ru_maxrss) << 10;
}

}  // namespace

TEST_CASE("A gzip file is read to its limit and no further") {
  const Folder folder;
  const auto path = folder.write("bomb", bomb("begin"));
  store::GzipReader reader(store::InputFile(path), {5, "that its header says"});
  std::vector<uint8_t> bytes(64);
  CHECK(reader.read(bytes.data(), 3) == 3);
  CHECK(bad_data([&] { reader.read(bytes.data() + 3, 61); }) ==
        path + ": longer than the 5 bytes that its header says");
  CHECK(std::string(bytes.begin(), bytes.begin() + 5) == "begin");
  CHECK(std::all_of(bytes.begin() + 5, bytes.end(), [](uint8_t byte) { return byte == 0; }));
  // A limit that is set later applies to the remaining bytes.
  store::GzipReader other(store::InputFile(path), {kGiB, "that are read"});
  CHECK(other.read(bytes.data(), 4) == 4);
  other.limit({1, "of the rest"});
  CHECK(other.read(bytes.data(), 1) == 1);
  CHECK(bad_data([&] { other.read(bytes.data(), 1); }) ==
        path + ": longer than the 1 bytes of the rest");
  // A file that ends exactly at the limit is read completely, including its checksum.
  for (const std::string& text : {std::string("begin"), gzip("begin")}) {
    const auto whole = folder.write("whole", text);
    store::GzipReader exact(store::InputFile(whole), {5, ""});
    CHECK(exact.read(bytes.data(), 64) == 5);
    CHECK(exact.read(bytes.data(), 64) == 0);
  }
  std::string damaged = gzip("begin");
  damaged[damaged.size() - 8] ^= 1;
  const auto file = folder.write("damaged", damaged);
  store::GzipReader checked(store::InputFile(file), {5, ""});
  CHECK(bad_data([&] { checked.read(bytes.data(), 64); }) == file + ": the gzip file is damaged");
}

TEST_CASE("An IDX file that decompresses to more than its header says costs no memory") {
  const Folder folder;
  const auto before = most_memory();
  const auto images = folder.write("images", bomb(idx_header({3, 2, 2})));
  const auto labels = folder.write("labels", idx_header({3}) + "abc");
  CHECK(bad_data([&] { read_idx(images, labels); }) ==
        images + ": longer than the 12 bytes that its header says");
  folder.write("images", gzip(idx_header({3, 2, 2}) + "abcdefghijkl"));
  folder.write("labels", bomb(idx_header({3})));
  CHECK(bad_data([&] { read_idx(images, labels); }) ==
        labels + ": longer than the 3 bytes that its header says");
  CHECK(most_memory() - before < size_t{64} << 20);
}

TEST_CASE("A safetensors file that is larger than its tensors costs no memory") {
  const Folder folder;
  const auto path = folder.write("sparse", std::string("\x02\0\0\0\0\0\0\0{}", 10));
  std::filesystem::resize_file(path, uint64_t{1} << 42);  // a sparse file
  CHECK(bad_data([&] { store::read_safetensors(path); }) ==
        path + ": 4398046511094 bytes too many after the last tensor");
  const std::string begin = path + ": not a safetensors file: ";
  write_text(path, std::string("\x01\0\0\x01\0\0\0\0{", 9));
  std::filesystem::resize_file(path, uint64_t{1} << 42);
  CHECK(bad_data([&] { store::read_safetensors(path); }) == begin + "a header of more than 16 MiB");
}

}  // namespace distrain::data
