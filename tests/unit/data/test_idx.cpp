#include <string>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>

#include "distrain/data/images.h"
#include "distrain/store/hash.h"
#include "gzip.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
namespace {

using namespace std::string_literals;

std::string images(uint32_t count, uint32_t rows, uint32_t columns, std::string_view pixels) {
  return big_endian(0x803) + big_endian(count) + big_endian(rows) + big_endian(columns) +
         std::string(pixels);
}

std::string labels(std::string_view classes) {
  return big_endian(0x801) + big_endian(static_cast<uint32_t>(classes.size())) +
         std::string(classes);
}

const std::string kPixels = "abcdefghijkl";
const std::string kImages = images(3, 2, 2, kPixels);
const std::string kLabels = labels("\x07\x00\x09"s);

class Files : public Folder {
 public:
  ImageSet read(std::string_view images, std::string_view labels) const {
    return read_idx(write("images", images), write("labels", labels));
  }
  // Checks that read() refuses the files and names `file`. Returns the reason in the message.
  std::string bad(const std::string& file, std::string_view images, std::string_view labels) const {
    const std::string message = bad_data([&] { read(images, labels); });
    REQUIRE(message.starts_with(path(file) + ": "));
    return message.substr(path(file).size() + 2);
  }
  std::string bad_images(std::string_view images) const { return bad("images", images, kLabels); }
  std::string bad_labels(std::string_view labels) const { return bad("labels", kImages, labels); }
};

}  // namespace

TEST_CASE("A pair of IDX files is read, plain or compressed, whatever its name") {
  const Files files;
  for (const auto& i : {kImages, gzip(kImages)}) {
    for (const auto& l : {kLabels, gzip(kLabels)}) {
      const ImageSet set = files.read(i, l);
      CHECK(set.count == 3);
      CHECK(set.rows == 2);
      CHECK(set.columns == 2);
      CHECK(std::string(set.pixels.begin(), set.pixels.end()) == kPixels);
      CHECK(set.labels == std::vector<uint8_t>{7, 0, 9});
      CHECK(set.content_hash == store::content_hash(kImages + kLabels));
    }
  }
}

TEST_CASE("A gzip file of several members is read as one") {
  const Files files;
  for (const size_t cut : {0, 1, 17, 28}) {
    const auto parts = gzip(kImages.substr(0, cut)) + gzip("") + gzip(kImages.substr(cut));
    const ImageSet set = files.read(parts, kLabels);
    CHECK(std::string(set.pixels.begin(), set.pixels.end()) == kPixels);
  }
}

TEST_CASE("Files larger than a buffer are read; opening a pipe does not block") {
  const Files files;
  std::string pixels(5'000'000, '\0');
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<char>(i * i >> 7);
  const auto text = images(50'000, 10, 10, pixels);
  const auto classes = labels(std::string(50'000, '\x03'));
  CHECK(files.read(text, classes).content_hash == store::content_hash(text + classes));
  CHECK(files.read(gzip(text), gzip(classes)).content_hash == store::content_hash(text + classes));

  const auto pipe = files.path("pipe");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(bad_data([&] { read_idx(pipe, files.path("labels")); }) == pipe + ": not a regular file");
}

TEST_CASE("An IDX file that is truncated at any byte is refused") {
  const Files files;
  const std::string whole[] = {kImages, gzip(kImages)};
  for (const auto& text : whole) {
    for (size_t size = 0; size < text.size(); ++size) {
      const std::string reason = files.bad_images(std::string_view(text).substr(0, size));
      CHECK(reason.find("cut short") != std::string::npos);
    }
  }
  for (const auto& text : {kLabels, gzip(kLabels)}) {
    for (size_t size = 0; size < text.size(); ++size) {
      const std::string reason = files.bad_labels(std::string_view(text).substr(0, size));
      CHECK(reason.find("cut short") != std::string::npos);
    }
  }
  CHECK(files.bad_images(kImages.substr(0, 20)) == "cut short: 4 of 12 bytes after the header");
  CHECK(files.bad_images("") == "cut short: no whole IDX header");
}

TEST_CASE("A file longer than its header says is refused") {
  const Files files;
  const std::string reason = "longer than the 12 bytes that its header says";
  CHECK(files.bad_images(kImages + "x") == reason);
  CHECK(files.bad_images(gzip(kImages + "x")) == reason);
  CHECK(files.bad_images(gzip(kImages) + gzip("x")) == reason);
  CHECK(files.bad_images(gzip(kImages) + "x") == "the gzip file is cut short");
  CHECK(files.bad_images(gzip(kImages) + "not gzip") == "the gzip file is damaged");
  CHECK(files.bad_labels(kLabels + "x") == "longer than the 3 bytes that its header says");
}

TEST_CASE("A changed bit in a gzip file is detected or changes nothing") {
  const Files files;
  const std::string whole = gzip(kImages);
  int same = 0;
  for (size_t at = 10; at < whole.size(); ++at) {  // skips the gzip header (time, system, …)
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = whole;
      text[at] = static_cast<char>(text[at] ^ 1 << bit);
      const auto path = files.write("images", text);
      try {
        const ImageSet set = files.read(text, kLabels);
        CHECK(set.content_hash == store::content_hash(kImages + kLabels));
        ++same;
      } catch (const base::Exception& exception) {
        CHECK(exception.kind() == base::ErrorKind::kBadData);
        CHECK(exception.error().message.starts_with(path + ": "));
      }
    }
  }
  CHECK(same < 8);  // only padding bits of the last byte may change
}

TEST_CASE("A file that is not an IDX file of bytes is refused") {
  const Files files;
  const auto told = [](const std::string& wanted, const std::string& begin) {
    return "not an IDX file of " + wanted + ": it begins with " + begin +
           ", but a file of images begins with 00000803, one of labels with 00000801";
  };
  CHECK(files.bad_images("\x89PNG\r\n\x1a\n") == told("images", "89504e47"));
  CHECK(files.bad_images(gzip("hello world, this is text")) == told("images", "68656c6c"));
  CHECK(files.bad_images(big_endian(0xD03) + kImages.substr(4)) == told("images", "00000d03"));
  CHECK(files.bad_images(kLabels) == told("images", "00000801"));
  CHECK(files.bad_labels(kImages) == told("labels", "00000803"));
  CHECK(files.bad_images(images(0, 2, 2, "")) == "no image in this file");
  CHECK(files.bad_images(images(3, 0, 2, "")) == "images of 0 x 2 pixels");
  CHECK(files.bad_images(images(3, 2, 0, "")) == "images of 2 x 0 pixels");
  CHECK(files.bad_labels(labels("ab")) == "2 labels for the 3 images of " + files.path("images"));
}

TEST_CASE("A header's claim alone does not allocate memory") {
  const Files files;
  CHECK(files.bad_images(images(UINT32_MAX, UINT32_MAX, UINT32_MAX, "")) ==
        "4294967295 images of 4294967295 x 4294967295 pixels are more than the 8 GiB that are "
        "read");
  CHECK(files.bad_images(images(8193, 1024, 1024, "")).find("8 GiB") != std::string::npos);
  // The header claims eight GiB of data, but the file has no data.
  const auto memory = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;  // KiB
  };
  const auto before = memory();
  CHECK(files.bad_images(images(8192, 1024, 1024, "x")) ==
        "cut short: 1 of 8589934592 bytes after the header");
  CHECK(memory() - before < 64 << 10);
  // A small file decompresses to 64 MB, more than its header claims.
  CHECK(files.bad_images(gzip(kImages + std::string(64 << 20, '\0'))) ==
        "longer than the 12 bytes that its header says");
}

TEST_CASE("An IDX file that cannot be read is an error with its name") {
  const Files files;
  const auto path = files.write("images", kImages);
  const auto missing = files.path("missing");
  const std::string no_file = "cannot open " + missing + ": No such file or directory";
  CHECK(bad_data([&] { read_idx(missing, path); }) == no_file);
  CHECK(bad_data([&] { read_idx(path, missing); }) == no_file);
  CHECK(bad_data([&] { read_idx(files.path(), path); }) == files.path() + ": not a regular file");
}

TEST_CASE("A folder of images may use several spellings of the file names") {
  for (const std::string separator : {"-", "."}) {
    for (const bool compressed : {false, true}) {
      const Folder folder;
      const auto write = [&](const std::string& set, const std::string& i, const std::string& l) {
        const std::string ending = compressed ? "-ubyte.gz" : "-ubyte";
        folder.write(set + "-images" + separator + "idx3" + ending, compressed ? gzip(i) : i);
        folder.write(set + "-labels" + separator + "idx1" + ending, compressed ? gzip(l) : l);
      };
      write("train", kImages, kLabels);
      CHECK(read_image_folder(folder.path()).train.count == 3);
      CHECK(!read_image_folder(folder.path()).test);
      write("t10k", images(1, 2, 2, "wxyz"), labels("\x01"));
      const ImageFolder read = read_image_folder(folder.path());
      REQUIRE(read.test);
      CHECK(read.test->count == 1);
      CHECK(read.test->pixels == std::vector<uint8_t>{'w', 'x', 'y', 'z'});
    }
  }
}

TEST_CASE("Images for prediction may have labels") {
  const Files files;
  const std::string path = files.write("t10k-images-idx3-ubyte", kImages);
  CHECK(read_images(path).pixels.size() == kPixels.size());
  CHECK(read_images(path).labels.empty());
  const std::string pipe = files.path("pipe");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  std::thread writer([&] { write_text(pipe, gzip(kImages)); });
  CHECK(read_images(pipe).count == 3);
  writer.join();
  files.write("t10k-labels-idx1-ubyte", kLabels);
  CHECK(read_images(path).labels.size() == 3);
  CHECK(read_images(files.path()).labels.size() == 3);
}

TEST_CASE("An incomplete folder of images is refused") {
  const Folder folder;
  const auto bad = [&] { return bad_data([&] { read_image_folder(folder.path()); }); };
  CHECK(bad_data([&] { read_image_folder(folder.path("none")); }) ==
        "cannot open " + folder.path("none") + ": No such file or directory");
  CHECK(bad() == folder.path() + ": no train-images-idx3-ubyte in this folder");
  folder.write("train-images-idx3-ubyte", kImages);
  CHECK(bad() == folder.path() + ": no train-labels-idx1-ubyte in this folder");
  folder.write("train-labels-idx1-ubyte", kLabels);
  folder.write("t10k-labels-idx1-ubyte", labels("\x01"));
  CHECK(bad() == folder.path() + ": no t10k-images-idx3-ubyte in this folder");
  folder.write("t10k-images-idx3-ubyte", images(1, 1, 4, "wxyz"));
  CHECK(bad() == folder.path("t10k-images-idx3-ubyte") +
                     ": images of 1 x 4 pixels, those to train with are 2 x 2");
  folder.write("t10k-images-idx3-ubyte", images(1, 2, 2, "wxyz"));
  CHECK(read_image_folder(folder.path()).test->count == 1);
}

}  // namespace distrain::data
