#include <algorithm>

#include <ATen/Functions.h>

#include "distrain/data/batches.h"
#include "distrain/data/images.h"
#include "distrain/nn/random.h"
#include "distrain/store/named_tensors.h"
#include "distrain/store/safetensors.h"
#include "resnet.h"
#include "run.h"

namespace distrain::scenario {

namespace {

// Keys that derive independent random sequences from one seed.
constexpr uint64_t kPixelSequence = 1;
constexpr uint64_t kLabelSequence = 2;
constexpr int64_t kColours = 3;

// Names of the formats of the data, which checkpoints store.
constexpr const char* kRandom = "random";
constexpr const char* kCifar = "cifar10";
constexpr const char* kIdx = "idx";

bool coloured(const data::ImageSet& images) { return images.channels == kColours; }

data::ImageForm form_of(const data::ImageSet& images, int64_t side) {
  if (!coloured(images)) return {{0.5}, {0.5}, kColours, side};
  // Mean and deviation of each channel of CIFAR-10's training images.
  return {{0.4914, 0.4822, 0.4465}, {0.2470, 0.2435, 0.2616}, kColours, side};
}

void check_labels(const data::ImageSet& images, const std::string& path, int64_t classes) {
  const auto largest = std::ranges::max_element(images.labels);
  if (largest == images.labels.end() || *largest < classes) return;
  base::bad_data("--classes " + std::to_string(classes) + ", but " + path + " has the label " +
                 std::to_string(*largest));
}

data::ImageSet read_test_images(const std::string& path, bool cifar, int64_t classes) {
  data::ImageSet images = cifar ? data::read_cifar10_images(path) : data::read_images(path);
  check_labels(images, path, classes);
  return images;
}

}  // namespace

std::vector<int64_t> full_batch(uint64_t seed, int64_t index, int64_t examples,
                                int64_t batch_size) {
  std::vector<int64_t> batch;
  data::Sampler sampler(seed, 1, examples, examples);
  // `place` is the position of an example in the sequence of epochs.
  for (int64_t place = index * batch_size; place < (index + 1) * batch_size; ++place) {
    const auto of_epoch = sampler.batch(place / examples, 0, 0);
    batch.push_back(of_epoch[static_cast<size_t>(place % examples)]);
  }
  return batch;
}

PipelineData::PipelineData(const PipelineOptions& options) : options_(options) {
  if (!options.weights.empty()) {
    weights_ = store::read_safetensors(options.weights);
    store::naming_file(options.weights,
                       [&] { check_weights(options.model, options.classes, weights_); });
  }
  if (options.data.empty()) return;
  images_ = data::read_training_images(options.data);
  check_labels(images_, options.data, options.classes);
  const auto read = [&](const std::string& folder, data::ImageSet& images) {
    if (folder.empty()) return;
    images = read_test_images(folder, coloured(images_), options.classes);
    if (images.labels.empty()) base::bad_data(folder + ": the images have no labels");
  };
  read(options.valid_data, valid_);
  read(options.test_data, test_);
}

PipelineData::PipelineData(const PipelineOptions& options, const job::Snapshot& snapshot,
                           const std::string& images)
    : options_(options) {
  const std::string kind = snapshot.agreed("format");
  if (kind == kRandom) snapshot.refuse("it was trained on random labels");
  test_ = read_test_images(images, kind == kCifar, options.classes);
}

job::Json PipelineData::describe() const {
  if (images_.count == 0) return {{"data", kRandom}};
  const data::ImageForm form = form_of(images_, options_.image_size);
  return {{"data", coloured(images_) ? kCifar : kIdx},
          {"images", images_.count},
          {"mean", form.mean},
          {"std", form.std}};
}

data::ImageBatch PipelineData::batch(int64_t index) const {
  const int64_t size = options_.batch_size, side = options_.image_size;
  if (images_.count > 0) {
    return data::make_batch(images_, full_batch(options_.seed, index, images_.count, size),
                            form_of(images_, side));
  }
  const auto generator = [&](uint64_t sequence) {
    return nn::keyed_generator({options_.seed, sequence, static_cast<uint64_t>(index)});
  };
  return {at::randn({size, kColours, side, side}, generator(kPixelSequence)),
          at::randint(options_.classes, {size}, generator(kLabelSequence), at::kLong)};
}

void PipelineData::each_batch(const data::ImageSet& images, const job::Share& share,
                              const std::function<void(const data::ImageBatch&)>& use) const {
  share.each_batch(images.count, options_.batch_size, [&](std::span<const int64_t> examples) {
    use(data::make_batch(images, examples, form_of(images, options_.image_size)));
  });
}

}  // namespace distrain::scenario
