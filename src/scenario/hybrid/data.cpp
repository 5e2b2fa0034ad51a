#include "data.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "distrain/base/trace.h"
#include "distrain/data/hash.h"
#include "distrain/rpc/placed.h"

namespace distrain::scenario {

namespace {

constexpr int64_t kTestBatch = 256;

at::Tensor to_tensor(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

HybridBatch to_batch(const data::Batch& batch) {
  return {to_tensor(batch.indices), to_tensor(batch.offsets), to_tensor(batch.targets)};
}

void each_batch(const data::TextDataset& set, const job::Share& share,
                const std::function<void(const HybridBatch&)>& use) {
  const int64_t end = share.end(set.size());
  for (int64_t first = share.first(set.size()); first < end; first += kTestBatch) {
    use(to_batch(data::make_batch(set, first, std::min(first + kTestBatch, end))));
  }
}

}  // namespace

HybridData::HybridData(const HybridOptions& options) : options_(options) {
  if (options.data.empty()) return;
  train_ = data::read_fast_text(options.data);
  sampler_.emplace(options.seed, options.trainers, train_->size(), options.batch_size);
  const auto read = [&](const std::string& path, std::optional<data::TextDataset>& set) {
    if (!path.empty()) set = data::read_fast_text(path, train_->vocabulary);
  };
  read(options.valid_data, valid_);
  read(options.test_data, test_);
}

HybridData::HybridData(const HybridOptions& options, const job::Snapshot& snapshot,
                       const std::string& examples)
    : options_(options) {
  const auto vocabulary = std::make_shared<data::TextVocabulary>();
  for (const std::string& word : snapshot.words("words")) vocabulary->words.add(word);
  vocabulary->labels = snapshot.words("labels");
  test_ = data::read_fast_text(examples, vocabulary, data::Labels::kSome);
}

HybridDataInfo HybridData::info() const {
  HybridDataInfo info;
  info.rows = text() ? text()->num_words() : options_.num_embeddings;
  info.classes = text() ? text()->num_classes() : options_.classes;
  return info;
}

void HybridData::agree(job::TrainingPlan& training) const {
  training.agree("rows", info().rows);
  training.agree("classes", info().classes);
  if (train_) {
    training.agree("data", std::to_string(train_->content_hash));
    training.keep("", job::part_of_words({{"words", data::all_words(train_->vocabulary->words)},
                                          {"labels", train_->vocabulary->labels}}));
  }
  if (valid_) training.alike("valid-data", std::to_string(valid_->content_hash));
  if (test_) training.alike("test-data", std::to_string(test_->content_hash));
}

int64_t HybridData::steps_per_epoch() const {
  return sampler_ ? sampler_->steps_per_epoch() : options_.batches;
}

HybridBatch HybridData::batch(int trainer, int64_t epoch, int64_t step) {
  const base::TraceScope scope("data");
  if (!train_) {
    const data::RandomBags bags{options_.seed, options_.num_embeddings, options_.classes};
    return to_batch(bags.batch(trainer, epoch, step));
  }
  return to_batch(data::make_batch(*train_, sampler_->batch(epoch, trainer, step)));
}

void HybridData::each_test_batch(const job::Share& share,
                                 const std::function<void(const HybridBatch&)>& use) const {
  each_batch(*test_, share, use);
}

HybridBatch HybridBatch::on(c10::Device device) const {
  return {rpc::placed(indices, device), rpc::placed(offsets, device), rpc::placed(targets, device)};
}

void HybridData::evaluate_in(job::TrainingPlan& training,
                             const std::function<at::Tensor(const HybridBatch&)>& forward) const {
  const auto of = [&](const data::TextDataset& set) {
    return [&set, forward](const job::Share& share) {
      job::Evaluation evaluation;
      each_batch(set, share, [&](const HybridBatch& batch) {
        const at::Tensor scores = forward(batch);
        evaluation.add(job::Evaluation::of(scores, rpc::placed(batch.targets, scores.device())));
      });
      return evaluation;
    };
  };
  if (valid_) training.evaluate_epochs(of(*valid_));
  if (test_) training.evaluate_at_end(of(*test_));
}

}  // namespace distrain::scenario
