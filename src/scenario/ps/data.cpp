#include <algorithm>
#include <span>
#include <utility>

#include <ATen/Functions.h>
#include <fmt/format.h>

#include "distrain/base/random.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/to_device.h"
#include "ps.h"

namespace distrain::scenario {

namespace {

constexpr int64_t kSide = 28;
constexpr int kClasses = 10;

void check_images(const std::string& path, const data::ImageSet& images) {
  if (images.rows != kSide || images.columns != kSide) {
    base::bad_data(
        fmt::format("{}: images of {} x {}, not 28 x 28", path, images.rows, images.columns));
  }
  for (const int label : images.labels) {
    if (label >= kClasses) base::bad_data(fmt::format("{}: label {}, not 0 to 9", path, label));
  }
}

data::ImageSet read_checked(const std::string& path) {
  data::ImageSet images = data::read_images(path);
  check_images(path, images);
  return images;
}

data::ImageSet read_labelled(const std::string& path) {
  data::ImageSet images = read_checked(path);
  if (images.labels.empty()) base::bad_data(path + ": the images have no labels");
  return images;
}

// Returns the key of the random dropout in one training step; nullopt if there is no dropout.
std::optional<uint64_t> dropout_key(const PsOptions& options, const job::Step& step) {
  if (options.dropout == 0) return std::nullopt;
  return base::Random({options.seed, static_cast<uint64_t>(step.epoch),
                       static_cast<uint64_t>(step.shard), static_cast<uint64_t>(step.number)})
      .next();
}

}  // namespace

PsData::PsData(const PsOptions& options)
    : options_(options),
      files_(data::read_image_folder(options.data)),
      examples_(options.limit > 0 ? std::min(options.limit, files_.train.count)
                                  : files_.train.count),
      sampler_(options.seed, options.trainers, examples_, options.step_size()) {
  check_images(options.data, files_.train);
  data::check_enough(options.data, examples_, options.trainers);
  if (files_.test) check_images(options.data, *files_.test);
  valid_ = std::exchange(files_.test, std::nullopt);
  if (!options.valid_data.empty()) valid_ = read_labelled(options.valid_data);
  if (!options.test_data.empty()) test_ = read_labelled(options.test_data);
}

PsData::PsData(const PsOptions& options, const std::string& images)
    : options_(options),
      test_(read_checked(images)),
      sampler_(options.seed, options.trainers, examples_, options.step_size()) {}

void PsData::agree(job::TrainingPlan& training) const {
  training.agree("data", std::to_string(files_.train.content_hash));
  training.agree("examples", examples_, "limit");
  const auto labels = std::span(files_.train.labels).first(static_cast<size_t>(examples_));
  if (std::ranges::count(labels, labels[0]) == examples_) {
    training.warn_of_one_label(options_.data, std::to_string(labels[0]));
  }
  training.agree("--mean", job::Json(options_.mean).dump());
  training.agree("--std", job::Json(options_.std).dump());
  if (valid_) training.alike("valid-data", std::to_string(valid_->content_hash));
  if (test_) training.alike("test-data", std::to_string(test_->content_hash));
}

std::vector<PsPart> PsData::parts(const job::Step& step) {
  const base::TraceScope scope("data");
  const auto [images, labels] =
      data::make_batch(files_.train, sampler_.batch(step.epoch, step.shard, step.number), form_);
  std::optional<uint64_t> key = dropout_key(options_, step);
  std::vector<PsPart> parts;
  const auto some = images.chunk(options_.accumulate), its = labels.chunk(options_.accumulate);
  for (size_t i = 0; i < some.size(); ++i) {
    parts.push_back({{some[i], its[i]}, key, 1.0 * its[i].numel() / labels.numel()});
    if (key) ++*key;
  }
  return parts;
}

at::Tensor PsPart::loss(const at::Tensor& scores) const {
  const base::TraceScope scope("loss");
  return at::nll_loss(scores, rpc::to_device(batch.labels, scores.device())) * weight;
}

void PsData::evaluate_in(job::TrainingPlan& training, const std::function<Forward()>& begin) const {
  const auto of = [&](const data::ImageSet& set) {
    return [this, &set, begin](const job::Share& share) {
      job::Evaluation evaluation;
      const Forward forward = begin();
      each_batch(set, share, [&](const data::ImageBatch& batch) {
        const at::Tensor scores = forward(batch.images);
        const at::Tensor targets = rpc::to_device(batch.labels, scores.device());
        const at::Tensor losses = at::nll_loss(scores, targets, {}, at::Reduction::Sum);
        evaluation.add(scores, targets, losses.item<double>());
      });
      return evaluation;
    };
  };
  if (valid_) training.evaluate_epochs(of(*valid_));
  if (test_) training.evaluate_at_end(of(*test_));
}

}  // namespace distrain::scenario
