#include "data.h"

#include <algorithm>
#include <numeric>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/error.h"
#include "distrain/base/trace.h"
#include "distrain/data/random.h"
#include "distrain/rpc/placed.h"

namespace distrain::scenario {

namespace {

constexpr int64_t kSide = 28;
constexpr int kClasses = 10;
constexpr int64_t kTestBatch =
    128;  // its largest activation stays below glibc's limit for the heap

void check(const std::string& folder, const data::ImageSet& set) {
  const auto fail = [&](const std::string& why) {
    throw base::Exception(base::ErrorKind::kBadData, folder + ": " + why);
  };
  if (set.rows != kSide || set.columns != kSide) {
    fail("images of " + std::to_string(set.rows) + " x " + std::to_string(set.columns) +
         ", not 28 x 28");
  }
  const auto largest = std::max_element(set.labels.begin(), set.labels.end());
  if (*largest >= kClasses) fail("class " + std::to_string(*largest) + " of ten (0 to 9)");
}

}  // namespace

PsData::PsData(const PsOptions& options)
    : options_(options), files_(data::read_image_folder(options.data)) {
  check(options.data, files_.train);
  if (files_.test) check(options.data, *files_.test);
  examples_ = options.limit > 0 ? std::min(options.limit, files_.train.count) : files_.train.count;
}

PsDataInfo PsData::info() const {
  PsDataInfo info;
  info.hash = files_.train.content_hash;
  info.examples = examples_;
  info.mean = options_.mean;
  info.std = options_.std;
  if (files_.test) {
    info.test_hash = files_.test->content_hash;
    info.test_examples = files_.test->count;
  }
  return info;
}

ImageBatch PsData::gather(const data::ImageSet& set, std::span<const int64_t> examples) const {
  const auto count = static_cast<int64_t>(examples.size());
  at::Tensor images = at::empty({count, 1, kSide, kSide}, at::kFloat);
  at::Tensor targets = at::empty({count}, at::kLong);
  const auto scale = static_cast<float>(1 / (255 * options_.std));
  const auto shift = static_cast<float>(options_.mean / options_.std);
  float* pixel = images.mutable_data_ptr<float>();
  auto* target = targets.mutable_data_ptr<int64_t>();
  constexpr int64_t kPixels = kSide * kSide;
  for (const int64_t example : examples) {
    const uint8_t* from = set.pixels.data() + example * kPixels;
    for (int64_t i = 0; i < kPixels; ++i) *pixel++ = static_cast<float>(from[i]) * scale - shift;
    *target++ = set.labels[static_cast<size_t>(example)];
  }
  return {images, targets};
}

ImageBatch PsData::batch(const job::Task& task) {
  const base::TraceScope scope("data");
  if (samplers_epoch_ != task.epoch) {
    samplers_.clear();
    samplers_epoch_ = task.epoch;
  }
  auto it = samplers_.find(task.shard);
  if (it == samplers_.end()) {
    it =
        samplers_
            .try_emplace(task.shard, options_.seed, task.epoch,
                         data::Shard{task.shard, options_.trainers}, examples_, options_.batch_size)
            .first;
  }
  return gather(files_.train, it->second.batch(task.step));
}

ImageBatch PsData::test_batch(int64_t first, int64_t last) const {
  std::vector<int64_t> examples(static_cast<size_t>(last - first));
  std::iota(examples.begin(), examples.end(), first);
  return gather(*files_.test, examples);
}

std::optional<uint64_t> dropout_key(const PsOptions& options, const job::Task& task) {
  if (!options.dropout) return std::nullopt;
  return data::Random({options.seed, static_cast<uint64_t>(task.epoch),
                       static_cast<uint64_t>(task.shard), static_cast<uint64_t>(task.step)})
      .next();
}

job::Schedule::Terms schedule_terms(const PsOptions& options, const PsDataInfo& data) {
  job::Schedule::Terms terms;
  terms.trainers = options.trainers;
  terms.epochs = options.epochs;
  terms.steps = options.steps;
  terms.steps_per_epoch =
      data::steps_per_epoch(data.examples, options.trainers, options.batch_size);
  terms.take_over = options.mode == "async";
  terms.save = !options.checkpoint.dir.empty();
  terms.save_every = options.checkpoint.every;
  return terms;
}

job::Json must_agree(const PsOptions& options, const PsDataInfo& data) {
  return {{"cmd", "ps"},
          {"trainers", options.trainers},
          {"mode", options.mode},
          {"batch_size", options.batch_size},
          {"dropout", options.dropout},
          {"seed", options.seed},
          {"mean", data.mean},
          {"std", data.std},
          {"data", std::to_string(data.hash)},
          {"examples", data.examples}};
}

int64_t PsData::test_batch_size() const {
  return std::clamp<int64_t>(options_.batch_size, 16, 128);
}

job::Evaluation evaluate_share(const PsData& data, int trainer, int trainers,
                               const std::function<at::Tensor(const at::Tensor& images)>& forward) {
  const base::TraceScope scope("evaluate");
  const at::NoGradGuard no_grad;
  job::Evaluation evaluation;
  const int64_t examples = data.info().test_examples;
  const int64_t end = examples * (trainer + 1) / trainers;
  for (int64_t i = examples * trainer / trainers; i < end; i += data.test_batch_size()) {
    const ImageBatch batch = data.test_batch(i, std::min(i + data.test_batch_size(), end));
    const at::Tensor scores = forward(batch.images);
    const at::Tensor targets = rpc::placed(batch.targets, scores.device());
    const at::Tensor losses = at::nll_loss(scores, targets, {}, at::Reduction::Sum);
    evaluation.add(scores, targets, losses.item<double>());
  }
  return evaluation;
}

}  // namespace distrain::scenario
