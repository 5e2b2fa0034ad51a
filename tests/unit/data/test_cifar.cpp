#include <string>

#include <zlib.h>

#include "distrain/data/images.h"
#include "distrain/store/hash.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
namespace {

// Returns the record of one image. The pixels of plane k are `label` + k, but the first is `first`.
std::string record(char label, char first = 100) {
  std::string bytes(1, label);
  for (int plane = 0; plane < 3; ++plane) {
    bytes += first;
    bytes += std::string(1023, static_cast<char>(label + plane));
  }
  return bytes;
}

std::string batch_name(int number) { return "data_batch_" + std::to_string(number) + ".bin"; }

// Writes the five training files. File k has two images, with the labels k and k + 1.
void write_batches(const Folder& folder, const std::string& below = "") {
  for (int k = 1; k <= 5; ++k) {
    folder.write(below + batch_name(k),
                 record(static_cast<char>(k)) + record(static_cast<char>(k + 1), 0));
  }
}

std::string bad(const Folder& folder, const std::string& file) {
  const std::string message = bad_data([&] { read_training_images(folder.path()); });
  REQUIRE(message.starts_with(folder.path(file) + ": "));
  return message.substr(folder.path(file).size() + 2);
}

}  // namespace

TEST_CASE("CIFAR-10's training files are read in order") {
  const Folder folder;
  write_batches(folder);
  const ImageSet read = read_training_images(folder.path());
  CHECK(read.count == 10);
  CHECK(read.channels == 3);
  CHECK(read.rows == 32);
  CHECK(read.columns == 32);
  CHECK(read.labels == std::vector<uint8_t>{1, 2, 2, 3, 3, 4, 4, 5, 5, 6});
  REQUIRE(read.pixels.size() == 10 * 3072);
  const auto pixel = [&](int image, int plane, int at) {
    return read.pixels[static_cast<size_t>(image * 3072 + plane * 1024 + at)];
  };
  CHECK(pixel(0, 0, 0) == 100);
  CHECK(pixel(0, 0, 1) == 1);
  CHECK(pixel(0, 2, 1023) == 3);
  CHECK(pixel(9, 1, 0) == 0);
  CHECK(pixel(9, 1, 5) == 7);
  std::string whole;
  for (int k = 1; k <= 5; ++k) whole += read_text(folder.path(batch_name(k)));
  CHECK(read.content_hash == store::content_hash(whole));
}

TEST_CASE("CIFAR-10's images for prediction are those of a file, or a folder's test images") {
  const Folder folder;
  folder.write("some.bin", record(3) + record(4));
  CHECK(read_cifar10_images(folder.path("some.bin")).labels == std::vector<uint8_t>{3, 4});
  CHECK(bad_data([&] { read_cifar10_images(folder.path()); }) ==
        folder.path() + ": no test_batch.bin in this folder");
  folder.write("test_batch.bin", record(9));
  CHECK(read_cifar10_images(folder.path()).labels == std::vector<uint8_t>{9});
}

TEST_CASE("CIFAR-10's files may lie in the folder of their archive") {
  const Folder folder;
  std::filesystem::create_directory(folder.path("cifar-10-batches-bin"));
  write_batches(folder, "cifar-10-batches-bin/");
  CHECK(read_training_images(folder.path()).count == 10);
  CHECK(read_training_images(folder.path("cifar-10-batches-bin")).count == 10);
}

TEST_CASE("a CIFAR-10 file may be larger than the read buffer, and compressed") {
  const Folder folder;
  write_batches(folder);
  std::string text;
  for (int i = 0; i < 3000; ++i) text += record(static_cast<char>(i % 10), static_cast<char>(i));
  for (const size_t records : {size_t{1024}, size_t{2048}, size_t{3000}}) {
    const std::string part = text.substr(0, records * 3073);
    folder.write(batch_name(2), part);
    const ImageSet plain = read_training_images(folder.path());
    CHECK(plain.count == static_cast<int64_t>(8 + records));
    CHECK(plain.labels[2 + records - 1] == (records - 1) % 10);
    gzFile file = gzopen(folder.path(batch_name(2)).c_str(), "wb");
    REQUIRE(gzwrite(file, part.data(), static_cast<unsigned>(part.size())) > 0);
    REQUIRE(gzclose(file) == Z_OK);
    const ImageSet compressed = read_training_images(folder.path());
    CHECK(compressed.content_hash == plain.content_hash);
    CHECK(compressed.pixels == plain.pixels);
  }
}

TEST_CASE("CIFAR-10 files that are missing or damaged are refused") {
  const Folder folder;
  write_batches(folder);
  for (int k = 1; k <= 5; ++k) {
    const std::string path = folder.path(batch_name(k));
    const std::string text = read_text(path);
    std::filesystem::remove(path);
    CHECK(bad_data([&] { read_training_images(folder.path()); }) ==
          folder.path() + ": no " + batch_name(k) + " in this folder");
    write_text(path, text);
  }
  const auto with = [&](const std::string& text) {
    folder.write(batch_name(4), text);
    return bad(folder, batch_name(4));
  };
  CHECK(with("") == "no image in this file");
  CHECK(with(record(1).substr(1)) == "3072 bytes are no whole number of records of 3073");
  CHECK(with(record(1) + "x") == "3074 bytes are no whole number of records of 3073");
  std::string many;
  for (int i = 0; i < 1500; ++i) many += record(1);
  CHECK(with(many + "x") == "4609501 bytes are no whole number of records of 3073");
  CHECK(with(record(9) + record(10)) == "record 1 has the label 10, not one of 0 to 9");
  CHECK(with(many + record('\xff')) == "record 1500 has the label 255, not one of 0 to 9");
  folder.write("test_batch.bin", "x");
  CHECK(bad_data([&] { read_cifar10_images(folder.path()); }) ==
        folder.path("test_batch.bin") + ": 1 bytes are no whole number of records of 3073");
}

}  // namespace distrain::data
