#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace distrain::data {

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

/// Reads `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and, if they exist, the `t10k-…`
/// files of a folder; each may end in `.gz` and be spelled with a dot (`train-images.idx3-ubyte`).
/// Throws `bad_data` as read_idx(), and if the images of the two sets differ in size.
ImageFolder read_image_folder(const std::string& folder);

/// Returns true if `folder` or its `cifar-10-batches-bin` has any of data_batch_1.bin to _5.bin.
bool has_cifar10(const std::string& folder);

/// Reads the binary version of CIFAR-10 (cs.toronto.edu/~kriz/cifar.html): data_batch_1.bin to
/// _5.bin for training and test_batch.bin, if it exists, from `folder` or its
/// `cifar-10-batches-bin`; each plain or gzip. A record is a label from 0 to 9 and the red, green
/// and blue planes of 32 x 32 bytes. Throws `bad_data`, with the file and the reason, for a
/// missing, unreadable, damaged or empty file, a partial record, another label, and more than 8
/// GiB.
ImageFolder read_cifar10(const std::string& folder);

/// Reads a file or pipe of records, or the test_batch.bin of a folder. Throws as read_cifar10().
ImageSet read_cifar10_images(const std::string& path);

/// How pixels become numbers for a net: (pixel - mean) / std per channel, with pixels from 0 to 1.
struct ImageForm {
  std::vector<double> mean, std;
  int64_t channels = 1;  ///< a single channel is repeated
  int64_t side = 0;      ///< resize to this size as torchvision's Resize (antialias); 0: no resize
};

struct ImageBatch {
  at::Tensor images;  ///< float [n, channels, rows, columns], contiguous
  at::Tensor labels;  ///< int64 [n]; -1 if the images have no labels
};

/// Returns the batch of the images with these indices in `images`, in this order.
ImageBatch make_batch(const ImageSet& images, std::span<const int64_t> examples,
                      const ImageForm& form);

/// Reads training images in `folder`: CIFAR-10's binary files or IDX files. Throws `bad_data`.
ImageSet read_training_images(const std::string& folder);

}  // namespace distrain::data
