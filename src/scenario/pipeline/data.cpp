#include "data.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <numeric>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/data/batches.h"
#include "distrain/data/cifar.h"
#include "distrain/nn/dropout.h"

namespace distrain::scenario {

namespace {

// Keys of the independent random sequences that come from one seed.
constexpr uint64_t kPixelSequence = 1;
constexpr uint64_t kLabelSequence = 2;
constexpr int64_t kColours = 3;

// Kinds of data.
constexpr const char* kRandom = "random";
constexpr const char* kCifar = "cifar10";
constexpr const char* kIdx = "idx";

// Of CIFAR-10's training images, channel by channel.
constexpr std::array<double, kColours> kCifarMean = {0.4914, 0.4822, 0.4465};
constexpr std::array<double, kColours> kCifarStd = {0.2470, 0.2435, 0.2616};
constexpr double kGreyMean = 0.5;
constexpr double kGreyStd = 0.5;

[[noreturn]] void bad_data(const std::string& message) {
  throw base::Exception(base::ErrorKind::kBadData, message);
}

data::ImageSet read_images(const std::string& folder) {
  if (data::has_cifar10(folder)) return data::read_cifar10(folder).train;
  // What is no folder is left to the reader's error.
  if (data::has_image_files(folder) || !std::filesystem::is_directory(folder)) {
    return data::read_image_folder(folder).train;
  }
  bad_data(folder +
           ": neither CIFAR-10's data_batch_1.bin nor train-images-idx3-ubyte in this folder");
}

bool coloured(const data::ImageSet& images) { return images.channels == kColours; }

std::vector<double> mean_of(const data::ImageSet& images) {
  if (!coloured(images)) return {kGreyMean};
  return {kCifarMean.begin(), kCifarMean.end()};
}

std::vector<double> std_of(const data::ImageSet& images) {
  if (!coloured(images)) return {kGreyStd};
  return {kCifarStd.begin(), kCifarStd.end()};
}

// As a tensor that is broadcast over [n, channels, rows, columns].
at::Tensor by_channel(const std::vector<double>& values) {
  return at::tensor(values, at::kFloat).view({1, -1, 1, 1});
}

}  // namespace

PipelineData::PipelineData(const PipelineOptions& options) : options_(options) {
  if (options_.data.empty()) return;
  images_ = read_images(options_.data);
  check_labels(images_, options_.data);
  const std::string& valid = options_.valid_data;
  if (valid.empty()) return;
  valid_images_ = coloured(images_) ? data::read_cifar10_images(valid) : data::read_images(valid);
  if (valid_images_.labels.empty()) bad_data(valid + ": images without labels");
  check_labels(valid_images_, valid);
}

PipelineData::PipelineData(const PipelineOptions& options, const job::Snapshot& snapshot,
                           const std::string& images)
    : options_(options) {
  const std::string kind = snapshot.agreed("format");
  if (kind == kRandom) snapshot.refuse("it was trained on random images, which have no classes");
  valid_images_ = kind == kCifar ? data::read_cifar10_images(images) : data::read_images(images);
  check_labels(valid_images_, images);
}

void PipelineData::check_labels(const data::ImageSet& images, const std::string& path) const {
  const auto largest = std::max_element(images.labels.begin(), images.labels.end());
  if (largest == images.labels.end() || *largest < options_.classes) return;
  bad_data("--classes " + std::to_string(options_.classes) + ", but " + path + " has the label " +
           std::to_string(*largest));
}

job::Json PipelineData::describe() const {
  if (images_.count == 0) return {{"data", kRandom}};
  return {{"data", coloured(images_) ? kCifar : kIdx},
          {"images", images_.count},
          {"mean", mean_of(images_)},
          {"std", std_of(images_)}};
}

PipelineBatch PipelineData::random_batch(int64_t index) const {
  const auto generator = [&](uint64_t sequence) {
    return nn::keyed_generator({options_.seed, sequence, static_cast<uint64_t>(index)});
  };
  const int64_t side = options_.image_size;
  return {
      at::randn({options_.batch_size, kColours, side, side}, generator(kPixelSequence)),
      at::randint(options_.classes, {options_.batch_size}, generator(kLabelSequence), at::kLong)};
}

std::vector<int64_t> PipelineData::examples_of(int64_t index) const {
  std::vector<int64_t> examples;
  int64_t place = index * options_.batch_size;  // in the epochs one after the other
  while (static_cast<int64_t>(examples.size()) < options_.batch_size) {
    const data::EpochSampler epoch(options_.seed, place / images_.count, {}, images_.count,
                                   images_.count);
    const auto rest = epoch.batch(0).subspan(static_cast<size_t>(place % images_.count));
    const size_t wanted = static_cast<size_t>(options_.batch_size) - examples.size();
    const auto taken = rest.first(std::min(wanted, rest.size()));
    examples.insert(examples.end(), taken.begin(), taken.end());
    place += static_cast<int64_t>(taken.size());
  }
  return examples;
}

PipelineBatch PipelineData::batch(int64_t index) const {
  return images_.count == 0 ? random_batch(index) : batch_of(images_, examples_of(index));
}

int64_t PipelineData::batches_per_epoch() const {
  return std::max<int64_t>(images_.count / options_.batch_size, 1);
}

PipelineBatch PipelineData::valid_batch(int64_t first, int64_t end) const {
  std::vector<int64_t> examples(static_cast<size_t>(end - first));
  std::iota(examples.begin(), examples.end(), first);
  return batch_of(valid_images_, examples);
}

PipelineBatch PipelineData::batch_of(const data::ImageSet& set,
                                     const std::vector<int64_t>& examples) const {
  const auto count = static_cast<int64_t>(examples.size());
  at::Tensor pixels = at::empty({count, set.channels, set.rows, set.columns}, at::kByte);
  at::Tensor labels = at::full({count}, -1, at::kLong);
  const auto bytes = static_cast<size_t>(pixels[0].numel());
  auto* pixel = pixels.mutable_data_ptr<uint8_t>();
  auto* label = labels.mutable_data_ptr<int64_t>();
  for (const int64_t example : examples) {
    const auto i = static_cast<size_t>(example);
    std::memcpy(pixel, set.pixels.data() + i * bytes, bytes);
    pixel += bytes;
    if (!set.labels.empty()) *label++ = set.labels[i];
  }
  at::Tensor images = pixels.to(at::kFloat).div_(255);
  images.sub_(by_channel(mean_of(set))).div_(by_channel(std_of(set)));
  const int64_t side = options_.image_size;
  if (set.rows != side || set.columns != side) {
    images = at::_upsample_bilinear2d_aa(images, {side, side}, false);
  }
  return {images.expand({count, kColours, side, side}).contiguous(), labels};
}

}  // namespace distrain::scenario
