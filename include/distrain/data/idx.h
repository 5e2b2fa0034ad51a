#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace distrain::data {

/// Limit of the decompressed size of one set of images.
inline constexpr uint64_t kMaxImageBytes = uint64_t{8} << 30;

/// Images with an optional class each; grey, as in MNIST's IDX files, or of several channels.
struct ImageSet {
  int64_t count = 0;
  int64_t channels = 1;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<uint8_t> pixels;  ///< [count, channels, rows, columns], row-major
  std::vector<uint8_t> labels;  ///< one per image, or empty
  uint64_t content_hash = 0;    ///< of the decompressed bytes of the files
};

/// Reads a pair of IDX files (yann.lecun.com/exdb/mnist: big-endian magic 0x803 and 0x801), each
/// plain or gzip, whatever its name. Throws `bad_data`, with the file and the reason, if a file is
/// unreadable, damaged, not IDX, of another element type, or if a length or count does not match.
ImageSet read_idx(const std::string& images, const std::string& labels);

struct ImageFolder {
  ImageSet train;
  std::optional<ImageSet> test;
};

/// Reads images to evaluate: the `t10k-…` pair of a folder, or a file and the labels beside it
/// (`labels-idx1` for `images-idx3`). Without labels the file may be a pipe. Throws as read_idx().
ImageSet read_images(const std::string& path);

/// Returns true if `folder` has the training images or labels that read_image_folder() reads.
bool has_image_files(const std::string& folder);

/// Reads `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and, if they exist, the `t10k-…`
/// files of a folder; each may end in `.gz` and be spelled with a dot (`train-images.idx3-ubyte`).
/// Throws `bad_data` as read_idx(), and if the images of the two sets differ in size.
ImageFolder read_image_folder(const std::string& folder);

}  // namespace distrain::data
