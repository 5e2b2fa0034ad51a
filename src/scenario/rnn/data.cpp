#include <filesystem>

#include "distrain/base/text.h"
#include "rnn.h"

namespace distrain::scenario {

namespace {

uint64_t memory_limit(const RnnOptions& options) {
  return static_cast<uint64_t>(base::byte_count(options.in_memory).value_or(0));
}

/// Returns true if the text is not read into memory. Only a regular file can be read repeatedly.
bool is_large(const RnnOptions& options, const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) &&
         std::filesystem::file_size(path, error) >= memory_limit(options);
}

/// Returns the index of a `.bin` file or a large text; otherwise an empty one.
data::TokenIndex index_of(const RnnOptions& options, const std::string& path, int64_t words) {
  if (is_bin(path)) return data::index_bin(path, options.token_type == "uint32" ? 4 : 2, words);
  if (!is_large(options, path)) return {};
  return data::index_text(path, {}, memory_limit(options));
}

}  // namespace

RnnScan scan_files(const RnnOptions& options) {
  RnnScan scan;
  if (options.data.empty()) return scan;
  if (is_bin(options.data)) {
    scan.train = index_of(options, options.data, options.vocab_size);
    scan.words = data::number_words(options.vocab_size).all();
  } else {
    const bool large = is_large(options, options.data);
    data::WordCounts counts(options.vocab_size, large ? data::WordCounts::kBounded : INT64_MAX);
    scan.train = data::index_text(
        options.data, [&](std::string_view word) { counts.add(word); }, memory_limit(options));
    if (!large) scan.train = {};
    scan.words = counts.most_frequent().all();
  }
  scan.valid = index_of(options, options.valid_data, options.vocab_size);
  scan.test = index_of(options, options.test_data, options.vocab_size);
  return scan;
}

RnnData::RnnData(const RnnOptions& options, const RnnScan& scan) : options_(options) {
  valid_ = test_ = data::make_tokens({});
  if (options.data.empty()) {
    const int64_t column = int64_t{options.batches} * options.bptt + 1;
    train_ = data::random_tokens(options.seed, options.vocab_size,
                                 column * options.step_size() * options.trainers);
    return;
  }
  vocabulary_.emplace(scan.words);
  // Report a wrong prompt before the training.
  store::naming_file("--prompt", [&] { data::to_tokens(options.prompt, *vocabulary_); });
  train_ = read(options.data, scan.train);
  if (!options.valid_data.empty()) valid_ = read(options.valid_data, scan.valid);
  if (!options.test_data.empty()) test_ = read(options.test_data, scan.test);
}

RnnData::RnnData(const RnnOptions& options, const job::Snapshot& snapshot, const std::string& text)
    : options_(options), vocabulary_(snapshot.words("words")) {
  if (words() < 2) snapshot.refuse("its vocabulary has fewer than two words");
  test_ = read(text, index_of(options, text, words()));
}

data::TokensPtr RnnData::read(const std::string& path, const data::TokenIndex& index) const {
  if (index.tokens > 0) return data::open_tokens(path, *vocabulary_, index);
  return data::load_text(path, *vocabulary_, memory_limit(options_));
}

job::Plan RnnData::plan() const {
  int64_t steps = 0;
  store::naming_file(options_.data, [&] { steps = columns_of(0, 0).steps(options_.bptt); });
  job::Plan plan = job::Plan::of(options_, steps);
  plan.unit = job::Unit::kWords;
  plan.take_over = false;
  return plan;
}

void RnnData::agree(job::TrainingPlan& training) const {
  training.agree("words", words(), "vocab_size");
  if (vocabulary_) {
    training.agree("data", std::to_string(train_->content_hash()));
    training.keep("", job::part_of_words({{"words", vocabulary_->all()}}));
  }
  training.alike("valid-data", std::to_string(valid_->content_hash()));
  training.alike("test-data", std::to_string(test_->content_hash()));
}

}  // namespace distrain::scenario
