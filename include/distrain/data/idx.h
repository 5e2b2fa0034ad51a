#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace distrain::data {

/// The most that is read of one set of images, decompressed.
inline constexpr uint64_t kMaxImageBytes = uint64_t{8} << 30;

/// Images with a class each: grey ones, as MNIST's IDX files hold them, or of several channels.
struct ImageSet {
  int64_t count = 0;
  int64_t channels = 1;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<uint8_t> pixels;  ///< count × channels × rows × columns, row by row
  std::vector<uint8_t> labels;  ///< count, or none
  uint64_t content_hash = 0;    ///< of the files' decompressed bytes
};

/// Reads a pair of IDX files (yann.lecun.com/exdb/mnist: big-endian magic 0x803 and 0x801), each
/// plain or gzip, whatever its name. Throws `bad_data`, with the file and the reason: unreadable,
/// damaged, not IDX, a wrong element type, a length or counts that do not fit.
ImageSet read_idx(const std::string& images, const std::string& labels);

struct ImageFolder {
  ImageSet train;
  std::optional<ImageSet> test;
};

/// Images to look at: a file of them, with their labels if there is a file beside it that is named
/// alike (`labels-idx1` for `images-idx3`), else without, then it may be a pipe; or the `t10k-…`
/// pair of a folder. Throws as read_idx().
ImageSet read_images(const std::string& path);

/// Whether `folder` has `train-images-idx3-ubyte` or `train-labels-idx1-ubyte`, however spelled.
bool has_image_files(const std::string& folder);

/// Reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, and `t10k-…` if they are there,
/// from a folder; each may end in `.gz`, and may be spelled with a dot (`train-images.idx3-ubyte`).
/// Throws `bad_data`; images of the two sets must have the same size.
ImageFolder read_image_folder(const std::string& folder);

}  // namespace distrain::data
