#include "data.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "distrain/base/random.h"
#include "distrain/base/trace.h"

namespace distrain::scenario {

namespace {

constexpr int64_t kValidColumns = 10;  // as PyTorch's word language model

data::Corpus random_text(const RnnOptions& options) {
  const int64_t column = int64_t{options.batches} * options.bptt + 1;
  base::Random random({options.seed});
  data::Corpus corpus;
  corpus.tokens.resize(static_cast<size_t>(column * options.batch_size * options.trainers));
  for (int64_t& token : corpus.tokens) {
    token = static_cast<int64_t>(random.below(static_cast<uint64_t>(options.vocab_size)));
  }
  return corpus;
}

WordBatch to_batch(const data::TokenColumns::Batch& batch) {
  return {at::tensor(batch.inputs, at::kLong).view({batch.length, -1}),
          at::tensor(batch.targets, at::kLong)};
}

}  // namespace

RnnData::RnnData(const RnnOptions& options) : options_(options) {
  if (options.data.empty()) {
    train_ = random_text(options);
    return;
  }
  vocabulary_ = data::read_words(options.data, options.vocab_size);
  train_ = data::read_corpus(options.data, *vocabulary_);
  if (options.valid_data.empty()) return;
  read_valid(options.valid_data);
}

RnnData::RnnData(const RnnOptions& options, const job::Snapshot& snapshot, const std::string& text)
    : options_(options), vocabulary_(std::in_place) {
  const std::vector<std::string> words = snapshot.words("words");
  if (words.size() < 2) snapshot.refuse("its vocabulary has not even the end of a line");
  for (const std::string& word : words) vocabulary_->add(word);
  read_valid(text);
}

void RnnData::read_valid(const std::string& path) {
  valid_ = data::read_corpus(path, *vocabulary_);
  // A line has an end, so they are two at least.
  const auto words = static_cast<int64_t>(valid_.tokens.size());
  valid_total_columns_ = std::min(kValidColumns, words / 2);
}

job::Plan RnnData::plan() const {
  const data::TokenColumns column(train_.tokens, int64_t{options_.trainers} * options_.batch_size,
                                  0, 1);
  job::Plan plan = job::Plan::of(options_, column.steps(options_.bptt));
  plan.unit = job::Unit::kWords;
  plan.take_over = false;
  return plan;
}

void RnnData::agree(job::TrainingPlan& training) const {
  training.agree("words", words());
  if (vocabulary_) {
    training.agree("data", std::to_string(train_.content_hash));
    training.keep("", job::part_of_words({{"words", data::all_words(*vocabulary_)}}));
  }
  training.alike("valid-data", std::to_string(valid_.content_hash));
}

WordBatch RnnData::batch(int trainer, int64_t step) const {
  const base::TraceScope scope("data");
  const int64_t columns = options_.batch_size;
  return to_batch(
      data::TokenColumns(train_.tokens, columns * options_.trainers, columns * trainer, columns)
          .batch(step, options_.bptt));
}

int64_t RnnData::valid_columns(const job::Share& share) const {
  return share.end(valid_total_columns_) - share.first(valid_total_columns_);
}

int64_t RnnData::valid_steps() const {
  if (valid_total_columns_ == 0) return 0;
  return data::TokenColumns(valid_.tokens, valid_total_columns_, 0, 1).steps(options_.bptt);
}

WordBatch RnnData::valid_batch(const job::Share& share, int64_t step) const {
  return to_batch(data::TokenColumns(valid_.tokens, valid_total_columns_,
                                     share.first(valid_total_columns_), valid_columns(share))
                      .batch(step, options_.bptt));
}

std::vector<std::vector<int64_t>> RnnData::valid_lines() const {
  std::vector<std::vector<int64_t>> lines(1);
  for (const int64_t word : valid_.tokens) {
    if (word == data::kEndOfLine) {
      lines.emplace_back();
    } else {
      lines.back().push_back(word);
    }
  }
  lines.pop_back();  // what follows the last end
  return lines;
}

}  // namespace distrain::scenario
