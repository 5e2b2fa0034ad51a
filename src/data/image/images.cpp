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
  if (has_cifar10(folder)) return read_cifar10(folder).train;
  // If `folder` is not a folder, read_image_folder() throws the error.
  if (has_image_files(folder) || !std::filesystem::is_directory(folder)) {
    return read_image_folder(folder).train;
  }
  base::bad_data(
      folder + ": neither CIFAR-10's data_batch_1.bin nor train-images-idx3-ubyte in this folder");
}

}  // namespace distrain::data
