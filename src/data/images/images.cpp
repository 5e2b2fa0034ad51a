#include "distrain/data/images.h"

#include <filesystem>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/data/cifar.h"

namespace distrain::data {

ImageBatch make_batch(const ImageSet& set, std::span<const int64_t> examples,
                      const ImageForm& form) {
  const at::Tensor places = at::tensor(at::IntArrayRef(examples.data(), examples.size()));
  const auto picked = [&](const std::vector<uint8_t>& bytes, at::IntArrayRef sizes) {
    return at::from_blob(const_cast<uint8_t*>(bytes.data()), sizes, at::kByte)
        .index_select(0, places);
  };
  const auto by_channel = [&](const auto& value) {
    at::Tensor values = at::empty({static_cast<int64_t>(form.mean.size()), 1, 1}, at::kFloat);
    for (size_t i = 0; i < form.mean.size(); ++i) values[static_cast<int64_t>(i)].fill_(value(i));
    return values;
  };
  at::Tensor images = picked(set.pixels, {set.count, set.channels, set.rows, set.columns});
  images = images.to(at::kFloat)
               .mul_(by_channel([&](size_t i) { return 1 / (255 * form.std[i]); }))
               .sub_(by_channel([&](size_t i) { return form.mean[i] / form.std[i]; }));
  if (form.side > 0 && (set.rows != form.side || set.columns != form.side)) {
    images = at::_upsample_bilinear2d_aa(images, {form.side, form.side}, false);
  }
  return {images.expand({-1, form.channels, -1, -1}).contiguous(),
          set.labels.empty() ? at::full({places.numel()}, -1, at::kLong)
                             : picked(set.labels, {set.count}).to(at::kLong)};
}

ImageSet read_training_images(const std::string& folder) {
  if (has_cifar10(folder)) return read_cifar10(folder).train;
  // What is no folder is left to the reader's error.
  if (has_image_files(folder) || !std::filesystem::is_directory(folder)) {
    return read_image_folder(folder).train;
  }
  base::bad_data(
      folder + ": neither CIFAR-10's data_batch_1.bin nor train-images-idx3-ubyte in this folder");
}

}  // namespace distrain::data
