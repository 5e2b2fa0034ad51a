#include <ATen/Functions.h>

#include "distrain/data/batches.h"
#include "scenario/pipeline/run.h"
#include "support/catch.h"
#include "support/scenario_data.h"

using namespace distrain;
using namespace distrain::scenario;
using job::Json;

namespace {

PipelineOptions small_options(const std::string& data = "") {
  PipelineOptions options;
  options.data = data;
  options.batch_size = 4;
  options.image_size = 32;
  options.classes = 10;
  return options;
}

// Writes 15 images. Image i has label i % 10, and all pixels of its planes are i + 20 * plane.
void write_cifar(const testing::Folder& folder) {
  for (int file = 0; file < 5; ++file) {
    std::string text;
    for (int i = 3 * file; i < 3 * file + 3; ++i) {
      text += static_cast<char>(i % 10);
      for (int plane = 0; plane < 3; ++plane) {
        text += std::string(1024, static_cast<char>(i + 20 * plane));
      }
    }
    folder.write("data_batch_" + std::to_string(file + 1) + ".bin", text);
  }
}

// Returns for each image of a batch its number i in write_cifar().
std::vector<int64_t> images_of(const data::ImageBatch& batch) {
  const at::Tensor numbers =
      batch.images.select(1, 0).mul(0.2470).add(0.4914).mul(255).round().to(at::kLong);
  std::vector<int64_t> images;
  for (int64_t i = 0; i < numbers.size(0); ++i) {
    CHECK((numbers[i] == numbers[i][0][0]).all().item<bool>());
    images.push_back(numbers[i][0][0].item<int64_t>());
    CHECK(batch.labels[i].item<int64_t>() == images.back() % 10);
  }
  return images;
}

}  // namespace

TEST_CASE("Full batches are drawn from one epoch after the other") {
  for (const int64_t batch_size : {4, 15, 40}) {
    CAPTURE(batch_size);
    std::vector<int64_t> seen, expected;
    for (int64_t index = 0; index * batch_size < 60; ++index) {
      const std::vector<int64_t> batch = full_batch(3, index, 15, batch_size);
      CHECK(static_cast<int64_t>(batch.size()) == batch_size);
      seen.insert(seen.end(), batch.begin(), batch.end());
    }
    data::Sampler sampler(3, 1, 15, 15);
    for (int64_t epoch = 0; expected.size() < seen.size(); ++epoch) {
      const auto one = sampler.batch(epoch, 0, 0);
      expected.insert(expected.end(), one.begin(), one.end());
    }
    expected.resize(seen.size());
    CHECK(seen == expected);
  }
}

TEST_CASE("random batches depend on their seed and number") {
  PipelineOptions options = small_options();
  options.batch_size = 50;
  options.classes = 7;
  const PipelineData source(options);
  const data::ImageBatch batch = source.batch(3);
  CHECK(batch.images.sizes() == std::vector<int64_t>{50, 3, 32, 32});
  CHECK(batch.images.scalar_type() == at::kFloat);
  CHECK(std::abs(batch.images.mean().item<double>()) < 0.02);
  CHECK(batch.images.std().item<double>() == Approx(1).epsilon(0.02));
  CHECK(batch.labels.sizes() == std::vector<int64_t>{50});
  CHECK(batch.labels.scalar_type() == at::kLong);
  CHECK(batch.labels.min().item<int64_t>() == 0);
  CHECK(batch.labels.max().item<int64_t>() == 6);
  const data::ImageBatch again = PipelineData(options).batch(3);
  CHECK(at::equal(again.images, batch.images));
  CHECK(at::equal(again.labels, batch.labels));
  options.seed = 2;
  for (const data::ImageBatch& other : {source.batch(4), PipelineData(options).batch(3)}) {
    CHECK_FALSE(at::equal(other.images, batch.images));
    CHECK_FALSE(at::equal(other.labels, batch.labels));
  }
  CHECK(source.describe() == Json({{"data", "random"}}));
}

TEST_CASE("a schedule as JSON has the start time of each step and the blocks of each stage") {
  PipelineOptions options = small_options();
  options.num_split = {2};
  const Json json = Json::parse(explain_pipeline(options, /*for_people=*/false));
  CHECK(json["schedule"] == "gpipe");
  CHECK(json["length"] == 6);
  CHECK(json["num_split"] == 2);
  REQUIRE(json["table"].size() == 2);
  CHECK(json["table"][1]["activations"] == 2);
  CHECK(json["table"][1]["blocks"][0] == "layer3.0");
  const Json& steps = json["table"][1]["steps"];
  REQUIRE(steps.size() == 4);
  CHECK(steps[0] == Json{{"op", "forward"}, {"micro_batch", 0}, {"begin", 1}});
  CHECK(steps[3] == Json{{"op", "backward"}, {"micro_batch", 1}, {"begin", 4}});
}

TEST_CASE("images are drawn epoch by epoch, each shuffled") {
  const testing::Folder folder;
  write_cifar(folder);
  const PipelineData source(small_options(folder.path()));
  std::vector<int64_t> seen;
  for (int64_t index = 0; index < 15; ++index) {
    const auto images = images_of(source.batch(index));
    CHECK(images.size() == 4);
    seen.insert(seen.end(), images.begin(), images.end());
  }
  std::vector<std::vector<int64_t>> epochs;
  for (int epoch = 0; epoch < 4; ++epoch) {
    epochs.emplace_back(seen.begin() + epoch * 15, seen.begin() + epoch * 15 + 15);
    std::vector<int64_t> sorted = epochs.back();
    std::sort(sorted.begin(), sorted.end());
    for (int64_t i = 0; i < 15; ++i) CHECK(sorted[static_cast<size_t>(i)] == i);
  }
  CHECK(epochs[0] != epochs[1]);
  CHECK(images_of(source.batch(2)) == std::vector<int64_t>(seen.begin() + 8, seen.begin() + 12));
  PipelineOptions options = small_options(folder.path());
  options.batch_size = 40;  // more images than the folder has
  CHECK(images_of(PipelineData(options).batch(0)) ==
        std::vector<int64_t>(seen.begin(), seen.begin() + 40));
  options.seed = 2;
  CHECK(images_of(PipelineData(options).batch(0)) !=
        std::vector<int64_t>(seen.begin(), seen.begin() + 40));
}

TEST_CASE("CIFAR-10's images are normalised by channel") {
  const testing::Folder folder;
  write_cifar(folder);
  const PipelineData source(small_options(folder.path()));
  const data::ImageBatch batch = source.batch(0);
  const int64_t first = images_of(batch)[0];
  for (int64_t plane = 0; plane < 3; ++plane) {
    const double mean[] = {0.4914, 0.4822, 0.4465}, std[] = {0.2470, 0.2435, 0.2616};
    const double pixel = static_cast<double>(first + 20 * plane) / 255;
    CHECK(batch.images[0][plane][5][5].item<double>() ==
          Approx((pixel - mean[plane]) / std[plane]).epsilon(1e-5));
  }
  CHECK(
      source.describe().dump() ==
      R"({"data":"cifar10","images":15,"mean":[0.4914,0.4822,0.4465],"std":[0.247,0.2435,0.2616]})");
}

TEST_CASE("grey images get three channels, and every image is resized") {
  const testing::Folder folder;
  testing::write_images(folder, 30, 0, 5);
  PipelineOptions options = small_options(folder.path());
  options.image_size = 28;
  const data::ImageBatch batch = PipelineData(options).batch(1);
  CHECK(batch.images.sizes() == std::vector<int64_t>{4, 3, 28, 28});
  CHECK(batch.images.is_contiguous());
  CHECK(at::equal(batch.images.select(1, 0), batch.images.select(1, 2)));
  CHECK(batch.images.min().item<double>() >= -1);
  CHECK(batch.images.max().item<double>() <= 1);
  // The label determines the position of the bright bar in an image.
  for (int64_t i = 0; i < 4; ++i) {
    const at::Tensor rows = batch.images[i][0].mean(1);
    CHECK(rows.argmax().item<int64_t>() / 2 == batch.labels[i].item<int64_t>() + 2);
  }
  options.image_size = 56;
  const at::Tensor larger = PipelineData(options).batch(1).images;
  CHECK(larger.sizes() == std::vector<int64_t>{4, 3, 56, 56});
  CHECK(at::allclose(larger, at::upsample_bilinear2d(batch.images, {56, 56}, false), 1e-4, 1e-5));
  // With antialiasing, a pixel at half the size is a mean over more than the two nearest pixels.
  options.image_size = 14;
  const at::Tensor smaller = PipelineData(options).batch(1).images;
  CHECK(smaller.sizes() == std::vector<int64_t>{4, 3, 14, 14});
  const double weights[] = {1, 3, 3, 1};
  double expected = 0;
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t column = 0; column < 4; ++column) {
      expected += weights[row] * weights[column] / 64 *
                  batch.images[0][0][9 + row][11 + column].item<double>();
    }
  }
  CHECK(smaller[0][0][5][6].item<double>() == Approx(expected).margin(1e-5));
  CHECK(PipelineData(options).describe().dump() ==
        R"({"data":"idx","images":30,"mean":[0.5],"std":[0.5]})");
}

TEST_CASE("a folder without images, or with other labels, is refused") {
  const testing::Folder folder;
  const auto refused = [&](const PipelineOptions& options) {
    return testing::bad_data([&] { PipelineData data(options); });
  };
  PipelineOptions options = small_options(folder.path());
  CHECK(refused(options) == folder.path() +
                                ": neither CIFAR-10's data_batch_1.bin nor "
                                "train-images-idx3-ubyte in this folder");
  CHECK(refused(small_options(folder.path("none"))) ==
        "cannot open " + folder.path("none") + ": No such file or directory");
  folder.write("train-images-idx3-ubyte", "x");
  CHECK(refused(options) == folder.path() + ": no train-labels-idx1-ubyte in this folder");
  write_cifar(folder);  // images of CIFAR-10 are looked for first
  CHECK(PipelineData(options).describe().at("data") == "cifar10");
  options.valid_data = folder.path();
  CHECK(refused(options) == folder.path() + ": no test_batch.bin in this folder");
  const testing::Folder grey;
  testing::write_images(grey, 3, 3, 5);
  options.valid_data = grey.path();
  CHECK(refused(options) == grey.path() + ": no test_batch.bin in this folder");
  options.valid_data.clear();
  options.test_data = grey.path();
  CHECK(refused(options) == grey.path() + ": no test_batch.bin in this folder");
  options.classes = 5;
  CHECK(refused(options) == "--classes 5, but " + folder.path() + " has the label 9");
  folder.write("data_batch_5.bin", "x");
  CHECK(refused(options).starts_with(folder.path("data_batch_5.bin") + ": "));
}
