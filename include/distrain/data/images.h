#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace distrain::data {

/// A set of images: grey, as in MNIST's IDX files, or with several channels. Labels are optional.
struct ImageSet {
  int64_t count = 0;
  int64_t channels = 1;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<uint8_t> pixels;  ///< [count, channels, rows, columns], row-major
  std::vector<uint8_t> labels;  ///< one per image, or empty
  uint64_t content_hash = 0;    ///< content_hash() of the decompressed bytes of the files
};

/// Reads a pair of IDX files (yann.lecun.com/exdb/mnist: big-endian magic 0x803 and 0x801). Detects
/// gzip by the content, not by the name. Throws `bad_data`, with the file and the reason, if a file
/// is unreadable, damaged, not IDX, of another element type, or if a length or count is wrong.
ImageSet read_idx(const std::string& images, const std::string& labels);

struct ImageFolder {
  ImageSet train;
  std::optional<ImageSet> test;
};

/// Reads images to evaluate: a folder's `t10k-…` pair, or an image file or pipe and, if it exists,
/// the labels file beside it (`labels-idx1` for `images-idx3`). Throws the errors of read_idx().
ImageSet read_images(const std::string& path);

/// Reads `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and, if they exist, the `t10k-…`
/// files of a folder. Names may end in `.gz` and have a dot before idx (`train-images.idx3-ubyte`).
/// Throws the errors of read_idx(), and `bad_data` if the two sets' images differ in size.
ImageFolder read_image_folder(const std::string& folder);

/// Reads the training images of an IDX folder, as read_image_folder() does, or of the binary
/// version of CIFAR-10 (cs.toronto.edu/~kriz/cifar.html): data_batch_1.bin to _5.bin in `folder` or
/// its `cifar-10-batches-bin`, plain or gzip. A record is a label from 0 to 9 and the red, green
/// and blue planes of 32 x 32 bytes. Throws `bad_data`, with the file and the reason, if `folder`
/// has the files of neither, if a file is missing, unreadable, damaged or empty, has a partial
/// record or another label, or if the set exceeds 8 GiB.
ImageSet read_training_images(const std::string& folder);

/// Reads CIFAR-10 records from a file, a pipe or the test_batch.bin of a folder, with the same
/// errors.
ImageSet read_cifar10_images(const std::string& path);

/// The conversion of pixels to a net's input: (pixel - mean) / std per channel, pixels in [0, 1].
struct ImageForm {
  std::vector<double> mean, std;
  int64_t channels = 1;  ///< channels of the input; a grey image's channel is repeated
  int64_t side = 0;      ///< resize to this size as torchvision's Resize (antialias); 0: no resize
};

struct ImageBatch {
  at::Tensor images;  ///< float [n, channels, rows, columns], contiguous
  at::Tensor labels;  ///< int64 [n]; -1 if the images have no labels
};

/// Returns a batch of the images of `images` at the indices `examples`, in their order.
ImageBatch make_batch(const ImageSet& images, std::span<const int64_t> examples,
                      const ImageForm& form);

}  // namespace distrain::data
