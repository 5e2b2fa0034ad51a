#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/idx.h"

namespace distrain::data {

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
