#include "distrain/data/images.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/store/disk.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"

namespace distrain::data {

namespace {

// Limit of the decompressed size of one set of images.
constexpr uint64_t kMaxImageBytes = uint64_t{8} << 30;
constexpr uint8_t kUnsignedBytes = 0x08;  // element type
constexpr uint64_t kMaxHeader = 16;       // bytes of a header with three dimensions

template <class... Args>
[[noreturn]] void refuse(const std::string& path, fmt::format_string<Args...> reason,
                         Args&&... args) {
  base::bad_data(path + ": " + fmt::format(reason, std::forward<Args>(args)...));
}

// One IDX file: u8 0 · u8 0 · u8 element type · u8 dimensions · dimensions × u32 size, elements.
class IdxFile {
 public:
  IdxFile(const std::string& path, store::ContentHasher& hasher,
          store::InputFile::Kind kind = store::InputFile::Kind::kRegular)
      : path_(path),
        reader_(store::InputFile(path, kind), {kMaxHeader, "of a header"}),
        hasher_(hasher) {}

  template <size_t N>
  std::array<uint64_t, N> read_sizes() {
    std::array<uint8_t, 4> magic;
    read_header(magic);
    if (magic != std::array<uint8_t, 4>{0, 0, kUnsignedBytes, N}) {
      refuse(path_,
             "not an IDX file of {}: it begins with {:02x}, but a file of images "
             "begins with 00000803, one of labels with 00000801",
             N == 3 ? "images" : "labels", fmt::join(magic, ""));
    }
    std::array<uint64_t, N> sizes;
    for (uint64_t& size : sizes) {
      std::array<uint8_t, 4> bytes;
      read_header(bytes);
      size = 0;
      for (const uint8_t byte : bytes) size = size << 8 | byte;
    }
    return sizes;
  }

  // Reads the rest of the file, which must have exactly `total` bytes.
  std::vector<uint8_t> read_elements(uint64_t total) {
    reader_.limit({total, "that its header says"});
    auto elements = store::read_to_end<std::vector<uint8_t>>(reader_, total);
    if (elements.size() < total) {
      refuse(path_, "cut short: {} of {} bytes after the header", elements.size(), total);
    }
    hasher_.add(elements);
    return elements;
  }

 private:
  void read_header(std::array<uint8_t, 4>& bytes) {
    if (reader_.read(bytes.data(), bytes.size()) < bytes.size()) {
      refuse(path_, "cut short: no whole IDX header");
    }
    hasher_.add(bytes);
  }

  const std::string& path_;
  store::GzipReader reader_;
  store::ContentHasher& hasher_;
};

std::string size_of(const ImageSet& set) { return fmt::format("{} x {}", set.rows, set.columns); }

void read_pixels(const std::string& path, store::InputFile::Kind kind, store::ContentHasher& hasher,
                 ImageSet& set) {
  IdxFile file(path, hasher, kind);
  const auto [count, rows, columns] = file.read_sizes<3>();
  set.count = static_cast<int64_t>(count);
  set.rows = static_cast<int64_t>(rows);
  set.columns = static_cast<int64_t>(columns);
  if (count == 0) refuse(path, "no image in this file");
  if (rows == 0 || columns == 0) refuse(path, "images of {} pixels", size_of(set));
  // rows * columns does not overflow, because each is below 2^32.
  if (rows * columns > kMaxImageBytes || count > kMaxImageBytes / (rows * columns)) {
    refuse(path, "{} images of {} pixels are more than the 8 GiB that are read", count,
           size_of(set));
  }
  set.pixels = file.read_elements(count * rows * columns);
}

void read_labels(const std::string& path, const std::string& images, store::ContentHasher& hasher,
                 ImageSet& set) {
  IdxFile file(path, hasher);
  const auto [count] = file.read_sizes<1>();
  if (count != static_cast<uint64_t>(set.count)) {
    refuse(path, "{} labels for the {} images of {}", count, set.count, images);
  }
  set.labels = file.read_elements(count);
}

ImageSet read_set(const std::string& images, store::InputFile::Kind kind,
                  const std::optional<std::string>& labels = {}) {
  ImageSet set;
  store::ContentHasher hasher;
  store::with_memory_for(images, [&] { read_pixels(images, kind, hasher, set); });
  if (labels) store::with_memory_for(*labels, [&] { read_labels(*labels, images, hasher, set); });
  set.content_hash = hasher.value();
  return set;
}

// Returns the existing file of a set ("train"), kind ("images") and type ("idx3"), if any.
std::optional<std::string> find_file(const std::string& folder, const std::string& set,
                                     const std::string& kind, const std::string& type) {
  for (const char* separator : {"-", "."}) {
    for (const char* ending : {"", ".gz"}) {
      std::string path = folder + "/" + set + "-" + kind + separator + type + "-ubyte" + ending;
      if (access(path.c_str(), F_OK) == 0) return path;
    }
  }
  return std::nullopt;
}

// Returns true if `folder` has the images file or the labels file of `set`.
bool has_any_of_pair(const std::string& folder, const std::string& set) {
  return find_file(folder, set, "images", "idx3") || find_file(folder, set, "labels", "idx1");
}

ImageSet read_pair(const std::string& folder, const std::string& set) {
  const auto images = find_file(folder, set, "images", "idx3");
  const auto labels = find_file(folder, set, "labels", "idx1");
  if (!images) refuse(folder, "no {}-images-idx3-ubyte in this folder", set);
  if (!labels) refuse(folder, "no {}-labels-idx1-ubyte in this folder", set);
  return read_idx(*images, *labels);
}

// CIFAR-10's files. A record is a label and the pixels of an image.
constexpr int64_t kSide = 32;
constexpr int64_t kChannels = 3;
constexpr uint8_t kClasses = 10;
constexpr size_t kRecord = 1 + kChannels * kSide * kSide;
constexpr size_t kChunk = 1024 * kRecord;
constexpr std::array kTrainingFiles = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                                       "data_batch_4.bin", "data_batch_5.bin"};

// Returns the path of `name` in `folder` or its `cifar-10-batches-bin`; empty if missing.
std::string find_cifar_file(const std::string& folder, const std::string& name) {
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
  store::GzipReader reader(store::InputFile(path, kind),
                           {left, "that are left of the 8 GiB that are read"});
  std::vector<uint8_t> chunk;
  uint64_t total = 0;
  do {
    chunk.resize(kChunk);
    chunk.resize(reader.read(chunk.data(), kChunk));
    total += chunk.size();
    if (chunk.size() % kRecord != 0) {
      refuse(path, "{} bytes are no whole number of records of {}", total, kRecord);
    }
    for (auto at = chunk.begin(); at != chunk.end(); at += kRecord) {
      if (*at >= kClasses) {
        refuse(path, "record {} has the label {}, not one of 0 to 9", set.count - before, *at);
      }
      set.labels.push_back(*at);
      set.pixels.insert(set.pixels.end(), at + 1, at + kRecord);
      ++set.count;
    }
    hasher.add(chunk);
  } while (chunk.size() == kChunk);
  if (set.count == before) refuse(path, "no image in this file");
}

ImageSet read_files(const std::vector<std::string>& paths,
                    store::InputFile::Kind kind = store::InputFile::Kind::kRegular) {
  ImageSet set;
  set.channels = kChannels;
  set.rows = set.columns = kSide;
  store::ContentHasher hasher;
  for (const std::string& path : paths) {
    store::with_memory_for(path, [&] { append_file(path, kind, hasher, set); });
  }
  set.content_hash = hasher.value();
  return set;
}

}  // namespace

ImageSet read_idx(const std::string& images, const std::string& labels) {
  return read_set(images, store::InputFile::Kind::kRegular, labels);
}

ImageSet read_images(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return read_pair(path, "t10k");
  const size_t kind = path.rfind("images");
  const size_t type = path.rfind("idx3");
  std::string labels = path;
  if (kind != std::string::npos && type != std::string::npos && kind < type) {
    labels.replace(type, 4, "idx1").replace(kind, 6, "labels");
    if (access(labels.c_str(), F_OK) == 0) return read_idx(path, labels);
  }
  return read_set(path, store::InputFile::Kind::kAny);
}

ImageFolder read_image_folder(const std::string& folder) {
  if (!store::OpenFolder::at(store::Disk(), folder)) store::fail_open(folder);
  ImageFolder result{read_pair(folder, "train"), {}};
  if (!has_any_of_pair(folder, "t10k")) return result;
  result.test = read_pair(folder, "t10k");
  if (result.test->rows != result.train.rows || result.test->columns != result.train.columns) {
    refuse(find_file(folder, "t10k", "images", "idx3").value_or(folder),
           "images of {} pixels, those to train with are {}", size_of(*result.test),
           size_of(result.train));
  }
  return result;
}

ImageSet read_cifar10_images(const std::string& path) {
  const std::string test = find_cifar_file(path, "test_batch.bin");
  if (test.empty() && std::filesystem::is_directory(path)) {
    refuse(path, "no test_batch.bin in this folder");
  }
  return read_files({test.empty() ? path : test}, store::InputFile::Kind::kAny);
}

ImageBatch make_batch(const ImageSet& set, std::span<const int64_t> examples,
                      const ImageForm& form) {
  const at::Tensor places = at::tensor(at::IntArrayRef(examples.data(), examples.size()));
  const auto picked = [&](const std::vector<uint8_t>& bytes, at::IntArrayRef sizes) {
    return at::from_blob(const_cast<uint8_t*>(bytes.data()), sizes, at::kByte)
        .index_select(0, places);
  };
  const at::Tensor mean = at::tensor(form.mean).view({-1, 1, 1});
  const at::Tensor deviation = at::tensor(form.std).view({-1, 1, 1});
  at::Tensor images = picked(set.pixels, {set.count, set.channels, set.rows, set.columns});
  images = images.to(at::kFloat)
               .mul_((1 / (255 * deviation)).to(at::kFloat))
               .sub_((mean / deviation).to(at::kFloat));
  if (form.side > 0 && (set.rows != form.side || set.columns != form.side)) {
    images = at::_upsample_bilinear2d_aa(images, {form.side, form.side}, false);
  }
  return {images.expand({-1, form.channels, -1, -1}).contiguous(),
          set.labels.empty() ? at::full({places.numel()}, -1, at::kLong)
                             : picked(set.labels, {set.count}).to(at::kLong)};
}

ImageSet read_training_images(const std::string& folder) {
  std::vector<std::string> paths;
  for (const char* name : kTrainingFiles) paths.push_back(find_cifar_file(folder, name));
  if (!std::ranges::all_of(paths, &std::string::empty)) {
    const auto missing = std::ranges::find(paths, "");
    if (missing == paths.end()) return read_files(paths);
    refuse(folder, "no {} in this folder", kTrainingFiles.at(missing - paths.begin()));
  }
  // If `folder` is not a folder, read_image_folder() throws the error.
  if (has_any_of_pair(folder, "train") || !std::filesystem::is_directory(folder)) {
    return read_image_folder(folder).train;
  }
  refuse(folder, "neither CIFAR-10's data_batch_1.bin nor train-images-idx3-ubyte in this folder");
}

}  // namespace distrain::data
