#include "data.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/data/batches.h"
#include "distrain/data/cifar.h"
#include "distrain/data/named_tensors.h"
#include "distrain/data/stored_tensors.h"
#include "distrain/models/resnet.h"
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

[[noreturn]] void bad_data(const std::string& message) {
  throw base::Exception(base::ErrorKind::kBadData, message);
}

bool coloured(const data::ImageSet& images) { return images.channels == kColours; }

data::ImageSet read_test_images(const std::string& path, bool cifar) {
  return cifar ? data::read_cifar10_images(path) : data::read_images(path);
}

}  // namespace

PipelineData::PipelineData(const PipelineOptions& options) : options_(options) {
  if (!options.weights.empty()) {
    weights_ = data::read_tensors(options.weights);
    data::naming_file(options.weights,
                      [&] { models::check_weights(options.model, options.classes, weights_); });
  }
  if (options.data.empty()) return;
  images_ = data::read_training_images(options.data);
  check_labels(images_, options.data);
  if (!options.valid_data.empty()) valid_ = read_labelled(options.valid_data);
  if (!options.test_data.empty()) test_ = read_labelled(options.test_data);
}

PipelineData::PipelineData(const PipelineOptions& options, const job::Snapshot& snapshot,
                           const std::string& images)
    : options_(options) {
  const std::string kind = snapshot.agreed("format");
  if (kind == kRandom) snapshot.refuse("it was trained on random images, which have no classes");
  test_ = read_test_images(images, kind == kCifar);
  check_labels(test_, images);
}

/// Of the kind that the model is trained on.
data::ImageSet PipelineData::read_labelled(const std::string& folder) const {
  data::ImageSet images = read_test_images(folder, coloured(images_));
  if (images.labels.empty()) bad_data(folder + ": images without labels");
  check_labels(images, folder);
  return images;
}

void PipelineData::check_labels(const data::ImageSet& images, const std::string& path) const {
  const auto largest = std::ranges::max_element(images.labels);
  if (largest == images.labels.end() || *largest < options_.classes) return;
  bad_data("--classes " + std::to_string(options_.classes) + ", but " + path + " has the label " +
           std::to_string(*largest));
}

data::ImageForm PipelineData::form_of(const data::ImageSet& images) const {
  data::ImageForm form{{0.5}, {0.5}, kColours, options_.image_size};
  if (!coloured(images)) return form;
  form.mean = {0.4914, 0.4822, 0.4465};  // CIFAR-10's training images, channel by channel
  form.std = {0.2470, 0.2435, 0.2616};
  return form;
}

job::Json PipelineData::describe() const {
  if (images_.count == 0) return {{"data", kRandom}};
  const data::ImageForm form = form_of(images_);
  return {{"data", coloured(images_) ? kCifar : kIdx},
          {"images", images_.count},
          {"mean", form.mean},
          {"std", form.std}};
}

data::ImageBatch PipelineData::batch(int64_t index) const {
  const int64_t size = options_.batch_size, side = options_.image_size;
  if (images_.count > 0) {
    return data::make_batch(images_, data::full_batch(options_.seed, index, images_.count, size),
                            form_of(images_));
  }
  const auto generator = [&](uint64_t sequence) {
    return nn::keyed_generator({options_.seed, sequence, static_cast<uint64_t>(index)});
  };
  return {at::randn({size, kColours, side, side}, generator(kPixelSequence)),
          at::randint(options_.classes, {size}, generator(kLabelSequence), at::kLong)};
}

int64_t PipelineData::batches_per_epoch() const {
  return std::max<int64_t>(images_.count / options_.batch_size, 1);
}

void PipelineData::each_batch(const data::ImageSet& images, const job::Share& share,
                              const std::function<void(const data::ImageBatch&)>& use) const {
  data::each_batch(images, share.first(images.count), share.end(images.count), options_.batch_size,
                   form_of(images), use);
}

}  // namespace distrain::scenario
