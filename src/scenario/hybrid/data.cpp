#include "data.h"

#include "distrain/base/trace.h"

namespace distrain::scenario {

namespace {

/// Returns at least 1,000 examples of epoch 0, which is not used for training.
data::TextDataset held_out(const RandomBags& bags) {
  data::TextDataset set;
  for (int64_t step = 0; set.size() < 1000; ++step) {
    const data::Batch batch = bags.batch(0, 0, step);
    const auto append = [](std::vector<int64_t>& to, const at::Tensor& from, int64_t add = 0) {
      const auto* const first = from.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < from.numel(); ++i) to.push_back(first[i] + add);
    };
    append(set.offsets, batch.offsets, std::ssize(set.tokens));
    append(set.tokens, batch.indices);
    append(set.labels, batch.targets);
  }
  set.offsets.push_back(std::ssize(set.tokens));
  return set;
}

}  // namespace

HybridData::HybridData(const HybridOptions& options) : options_(options) {
  if (options.has_teacher()) valid_ = held_out(bags_);
  if (!options.has_text()) return;
  train_ = data::read_fast_text(options.data);
  data::check_enough(options.data, train_->size(), options.trainers);
  words_ = train_->vocabulary;
  sampler_.emplace(options.seed, options.trainers, train_->size(), options.batch_size);
  if (!options.valid_data.empty()) valid_ = data::read_fast_text(options.valid_data, words_);
  if (!options.test_data.empty()) test_ = data::read_fast_text(options.test_data, words_);
}

HybridData::HybridData(const HybridOptions& options, const job::Snapshot& snapshot,
                       const std::string& examples)
    : options_(options),
      words_(std::make_shared<data::TextVocabulary>(data::TextVocabulary{
          data::Vocabulary(snapshot.words("words")), snapshot.words("labels")})),
      test_(data::read_fast_text(examples, words_, data::Labels::kSome)) {}

int64_t HybridData::unknown_words() const {
  return (valid_ ? valid_->dropped_tokens : 0) + (test_ ? test_->dropped_tokens : 0);
}

void HybridData::agree(job::TrainingPlan& training) const {
  training.agree("rows", rows(), "num_embeddings");
  training.agree("classes", classes(), "classes");
  if (options_.has_teacher()) training.agree("data", options_.data);
  if (train_) {
    training.agree("data", std::to_string(train_->content_hash));
    if (classes() == 1) training.warn_of_one_label(options_.data, labels()[0]);
    training.keep("", job::part_of_words(
                          {{"words", data::all_words(words_->words)}, {"labels", words_->labels}}));
  }
  if (valid_) training.alike("valid-data", std::to_string(valid_->content_hash));
  if (test_) training.alike("test-data", std::to_string(test_->content_hash));
}

data::Batch HybridData::batch(const job::Step& step) {
  const base::TraceScope scope("data");
  if (!train_) return bags_.batch(step.shard, step.epoch, step.number);
  return data::make_batch(*train_, sampler_->batch(step.epoch, step.shard, step.number));
}

void HybridData::each_batch(const data::TextDataset& set, const job::Share& share,
                            const std::function<void(const data::Batch&)>& use) {
  constexpr int64_t kBatch = 256;
  share.each_batch(set.size(), kBatch, [&](std::span<const int64_t> examples) {
    use(data::make_batch(set, examples));
  });
}

void HybridData::evaluate_in(job::TrainingPlan& training,
                             const std::function<at::Tensor(const data::Batch&)>& forward) const {
  const auto of = [&](const data::TextDataset& set) {
    return [&set, forward](const job::Share& share) {
      job::Evaluation evaluation;
      each_batch(set, share, [&](const data::Batch& batch) {
        evaluation.add(job::Evaluation::of(forward(batch), batch.targets));
      });
      return evaluation;
    };
  };
  if (valid_) training.evaluate_epochs(of(*valid_));
  if (test_) training.evaluate_at_end(of(*test_));
}

}  // namespace distrain::scenario
