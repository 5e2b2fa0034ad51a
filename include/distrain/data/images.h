#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/data/idx.h"

namespace distrain::data {

/// How images become numbers for a net: from 0 to 1, less `mean`, by `std`, of each channel.
struct ImageForm {
  std::vector<double> mean, std;
  int64_t channels = 1;  ///< one that there is is repeated
  int64_t side = 0;  ///< resized as torchvision's Resize does it (bilinear, with antialias); 0: not
};

struct ImageBatch {
  at::Tensor images;  ///< float [n, channels, rows, columns], contiguous
  at::Tensor labels;  ///< int64 [n]; -1 where there are none
};

/// The batch of these examples (their numbers in `images`), in this order.
ImageBatch make_batch(const ImageSet& images, std::span<const int64_t> examples,
                      const ImageForm& form);

/// Images to train with: `folder` has CIFAR-10's binary or IDX files. Throws `bad_data`.
ImageSet read_training_images(const std::string& folder);

}  // namespace distrain::data
