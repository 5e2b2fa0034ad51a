#include "data.h"

#include <algorithm>
#include <numeric>
#include <span>

#include <ATen/Functions.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/placed.h"

namespace distrain::scenario {

namespace {

constexpr int64_t kSide = 28;
constexpr int kClasses = 10;
// Of an evaluation's examples: its largest activation stays below glibc's limit for the heap.
constexpr int64_t kMostAtOnce = 128;

ImageBatch gather(const PsOptions& options, const data::ImageSet& set,
                  std::span<const int64_t> examples) {
  const auto count = static_cast<int64_t>(examples.size());
  at::Tensor images = at::empty({count, 1, kSide, kSide}, at::kFloat);
  at::Tensor targets = at::full({count}, -1, at::kLong);
  const auto scale = static_cast<float>(1 / (255 * options.std));
  const auto shift = static_cast<float>(options.mean / options.std);
  float* pixel = images.mutable_data_ptr<float>();
  auto* target = targets.mutable_data_ptr<int64_t>();
  constexpr int64_t kPixels = kSide * kSide;
  for (const int64_t example : examples) {
    const uint8_t* from = set.pixels.data() + example * kPixels;
    for (int64_t i = 0; i < kPixels; ++i) *pixel++ = static_cast<float>(from[i]) * scale - shift;
    if (!set.labels.empty()) *target++ = set.labels[static_cast<size_t>(example)];
  }
  return {images, targets};
}

}  // namespace

void check_images(const std::string& path, const data::ImageSet& images) {
  const auto fail = [&](const std::string& why) {
    throw base::Exception(base::ErrorKind::kBadData, path + ": " + why);
  };
  if (images.rows != kSide || images.columns != kSide) {
    fail("images of " + std::to_string(images.rows) + " x " + std::to_string(images.columns) +
         ", not 28 x 28");
  }
  for (const int label : images.labels) {
    if (label >= kClasses) fail("class " + std::to_string(label) + " of ten (0 to 9)");
  }
}

void each_batch(const PsOptions& options, const data::ImageSet& images, const job::Share& share,
                const std::function<void(const ImageBatch&)>& use) {
  const auto batch_size = std::clamp<int64_t>(options.batch_size, 16, kMostAtOnce);
  const int64_t end = share.end(images.count);
  for (int64_t first = share.first(images.count); first < end; first += batch_size) {
    std::vector<int64_t> examples(static_cast<size_t>(std::min(batch_size, end - first)));
    std::iota(examples.begin(), examples.end(), first);
    use(gather(options, images, examples));
  }
}

PsData::PsData(const PsOptions& options)
    : options_(options),
      files_(data::read_image_folder(options.data)),
      examples_(options.limit > 0 ? std::min(options.limit, files_.train.count)
                                  : files_.train.count),
      sampler_(options.seed, options.trainers, examples_, options.batch_size) {
  check_images(options.data, files_.train);
  if (files_.test) check_images(options.data, *files_.test);
}

job::Plan PsData::plan() const {
  job::Plan plan = job::Plan::of(options_, sampler_.steps_per_epoch());
  plan.what_must_agree = "the files, --mean and --std";
  return plan;
}

void PsData::agree(job::TrainingPlan& training) const {
  training.agree("data", std::to_string(files_.train.content_hash));
  training.agree("examples", examples_);
  training.agree("--mean", job::Json(options_.mean).dump());
  training.agree("--std", job::Json(options_.std).dump());
  if (files_.test) training.alike("test-data", std::to_string(files_.test->content_hash));
}

ImageBatch PsData::batch(const job::Step& step) {
  const base::TraceScope scope("data");
  return gather(options_, files_.train, sampler_.batch(step.epoch, step.shard, step.number));
}

job::Evaluation PsData::evaluate(
    const job::Share& share,
    const std::function<at::Tensor(const at::Tensor& images)>& forward) const {
  job::Evaluation evaluation;
  if (!files_.test) return evaluation;
  each_batch(options_, *files_.test, share, [&](const ImageBatch& batch) {
    const at::Tensor scores = forward(batch.images);
    const at::Tensor targets = rpc::placed(batch.targets, scores.device());
    const at::Tensor losses = at::nll_loss(scores, targets, {}, at::Reduction::Sum);
    evaluation.add(scores, targets, losses.item<double>());
  });
  return evaluation;
}

std::optional<uint64_t> dropout_key(const PsOptions& options, const job::Step& step) {
  if (!options.dropout) return std::nullopt;
  return base::Random({options.seed, static_cast<uint64_t>(step.epoch),
                       static_cast<uint64_t>(step.shard), static_cast<uint64_t>(step.number)})
      .next();
}

}  // namespace distrain::scenario
