#include "distrain/base/trace.h"
#include "rnn.h"

namespace distrain::scenario {

RnnData::RnnData(const RnnOptions& options) : options_(options) {
  if (options.data.empty()) {
    const int64_t column = int64_t{options.batches} * options.bptt + 1;
    train_ = data::random_corpus(options.seed, options.vocab_size,
                                 column * options.batch_size * options.trainers);
    return;
  }
  vocabulary_ = data::read_words(options.data, options.vocab_size);
  train_ = data::read_corpus(options.data, *vocabulary_);
  if (!options.valid_data.empty()) valid_ = data::read_corpus(options.valid_data, *vocabulary_);
  if (!options.test_data.empty()) test_ = data::read_corpus(options.test_data, *vocabulary_);
}

RnnData::RnnData(const RnnOptions& options, const job::Snapshot& snapshot, const std::string& text)
    : options_(options), vocabulary_(snapshot.words("words")) {
  if (words() < 2) snapshot.refuse("its vocabulary has fewer than two words");
  test_ = data::read_corpus(text, *vocabulary_);
}

job::Plan RnnData::plan() const {
  int64_t steps = 0;
  store::naming_file(options_.data, [&] { steps = columns_of(0).steps(options_.bptt); });
  job::Plan plan = job::Plan::of(options_, steps);
  plan.unit = job::Unit::kWords;
  plan.take_over = false;
  return plan;
}

void RnnData::agree(job::TrainingPlan& training) const {
  training.agree("words", words(), "vocab_size");
  if (vocabulary_) {
    training.agree("data", std::to_string(train_.content_hash));
    training.keep("", job::part_of_words({{"words", vocabulary_->all()}}));
  }
  training.alike("valid-data", std::to_string(valid_.content_hash));
  training.alike("test-data", std::to_string(test_.content_hash));
}

data::TokenColumns RnnData::columns_of(int trainer) const {
  const int64_t own = options_.batch_size;
  return {train_.tokens, own * options_.trainers, own * trainer, own};
}

WordBatch RnnData::batch(const job::Step& step) const {
  const base::TraceScope scope("data");
  return columns_of(step.shard).batch(step.number, options_.bptt);
}

}  // namespace distrain::scenario
