#include <ATen/Functions.h>

#include "distrain/data/images.h"
#include "support/catch.h"
#include "support/files.h"

namespace distrain::data {

using namespace testing;
namespace {

// Returns three images with two channels of 2 x 3 pixels. The pixel values count up from 0.
ImageSet numbered() {
  ImageSet set;
  set.count = 3;
  set.channels = 2;
  set.rows = 2;
  set.columns = 3;
  for (uint8_t i = 0; i < 36; ++i) set.pixels.push_back(i);
  set.labels = {7, 8, 9};
  return set;
}

}  // namespace

TEST_CASE("A batch of images is in the requested order and normalised by channel") {
  const ImageSet set = numbered();
  const std::vector<int64_t> examples = {2, 0, 2};
  const ImageBatch batch = make_batch(set, examples, {{0.5, 0.25}, {0.5, 2}, 2});
  CHECK(batch.images.sizes() == std::vector<int64_t>{3, 2, 2, 3});
  CHECK(batch.images.is_contiguous());
  CHECK(at::equal(batch.images[0], batch.images[2]));
  CHECK(batch.images[0][0][0][0].item<double>() == Approx((24 / 255.0 - 0.5) / 0.5));
  CHECK(batch.images[1][1][1][2].item<double>() == Approx((11 / 255.0 - 0.25) / 2));
  CHECK(at::equal(batch.labels, at::tensor({9, 7, 9}, at::kLong)));
}

TEST_CASE("Images are resized, and a single channel is repeated") {
  ImageSet set = numbered();
  set.count = 6;
  set.channels = 1;
  set.labels.clear();
  const ImageBatch batch = make_batch(set, std::vector<int64_t>{5}, {{0}, {1}, 3, 8});
  CHECK(batch.images.sizes() == std::vector<int64_t>{1, 3, 8, 8});
  CHECK(batch.images.is_contiguous());
  CHECK(at::equal(batch.images.select(1, 0), batch.images.select(1, 2)));
  CHECK(batch.images[0][0][0][0].item<double>() == Approx(30 / 255.0));
  CHECK(batch.images[0][0][7][7].item<double>() == Approx(35 / 255.0));
  CHECK(batch.labels.item<int64_t>() == -1);
}

TEST_CASE("A folder without training images is refused") {
  const Folder folder;
  CHECK(bad_data([&] { read_training_images(folder.path()); }) ==
        folder.path() +
            ": neither CIFAR-10's data_batch_1.bin nor train-images-idx3-ubyte in this folder");
  CHECK(bad_data([&] { read_training_images(folder.path("none")); }) ==
        "cannot open " + folder.path("none") + ": No such file or directory");
}

}  // namespace distrain::data
