#include <algorithm>
#include <limits>
#include <map>

#include <ATen/Functions.h>

#include "distrain/base/random.h"
#include "distrain/base/trace.h"
#include "hybrid.h"

namespace distrain::scenario {

namespace {

// Keys that derive independent random sequences from one seed.
constexpr uint64_t kBagSequence = 2;
constexpr uint64_t kTeacherSequence = 3;

// Streams of hashed words take their labels from so many examples of the first files.
constexpr int64_t kLabelExamples = 65536;
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

void check_positive(int64_t value, const std::string& what) {
  if (value < 1) base::invalid(what + " must be at least 1, not " + std::to_string(value));
}

/// Returns at least 1,000 examples of epoch 0, which is not used for training.
data::TextDataset held_out(const RandomBags& bags) {
  data::TextDataset set;
  for (int64_t step = 0; set.size() < 1000; ++step) {
    data::append_batch(set, bags.batch(0, 0, step));
  }
  return set;
}

}  // namespace

data::Batch RandomBags::batch(int trainer, int64_t epoch, int64_t step) const {
  check_positive(num_embeddings, "the number of embeddings");
  check_positive(classes, "the number of classes");
  base::Random random({seed, kBagSequence, static_cast<uint64_t>(trainer),
                       static_cast<uint64_t>(epoch), static_cast<uint64_t>(step)});
  std::vector<int64_t> indices, offsets, targets;
  const int64_t count = random.between(20, 50);
  for (int64_t i = 0; i < count; ++i) indices.push_back(random.between(0, num_embeddings - 1));
  for (int64_t start = 0; start < count; start += random.between(1, 10)) {
    offsets.push_back(start);
  }
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int64_t first = offsets[i];
    const int64_t end = i + 1 < offsets.size() ? offsets[i + 1] : count;
    const auto bag = std::span(indices).subspan(first, end - first);
    targets.push_back(has_teacher ? taught(bag) : random.between(0, classes - 1));
  }
  return {at::tensor(indices, at::kLong), at::tensor(offsets, at::kLong),
          at::tensor(targets, at::kLong)};
}

int64_t RandomBags::taught(std::span<const int64_t> bag) const {
  std::map<int64_t, double> weights;
  for (const int64_t index : bag) {
    base::Random random({seed, kTeacherSequence, static_cast<uint64_t>(index)});
    const int64_t label = random.between(0, classes - 1);
    weights[label] += random.unit();
  }
  return std::ranges::max_element(weights, {}, [](const auto& each) { return each.second; })->first;
}

bool HybridOptions::streams() const {
  if (!has_text()) return false;
  if (data_from == "rank0" || bad_rows == "skip" || steps_per_epoch > 0) return true;
  const std::vector<std::string> paths = data::expand_paths(data::split_paths(data));
  // Without a vocabulary from a pass before, a pipe is read into memory.
  if (paths.size() == 1 && paths[0] != "-" && data::is_pipe(paths[0]) && hash_bits == 0)
    return false;
  return paths.size() > 1 || !data::fits_in_memory(paths[0], *base::byte_count(in_memory)) ||
         format_of(paths) != data::Format::kFastText;
}

data::Format HybridOptions::format_of(const std::vector<std::string>& paths) const {
  const bool is_criteo = data_format == "auto"
                             ? data::detect_format(paths[0]) == data::Format::kCriteo
                             : data_format == "criteo";
  if (!is_criteo) return data::Format::kFastText;
  if (hash_bits == 0) base::invalid(paths[0] + ": Criteo's format needs --hash-bits, such as 26");
  return data::Format::kCriteo;
}

HybridData::HybridData(const HybridOptions& options, const std::vector<int>& trainers,
                       const Sharing& sharing)
    : options_(options) {
  if (options.has_teacher()) valid_ = held_out(bags_);
  if (!options.has_text()) return;
  if (options.streams()) {
    open_streams(trainers, sharing);
  } else {
    if (trainers[0] == 0 && sharing.common) sharing.common([] { return Common(); });
    train_ = data::read_fast_text(options.data, nullptr, data::Labels::kAll, options.hash_bits);
    data::check_enough(options.data, train_->size(), options.trainers);
    words_ = train_->vocabulary;
    sampler_.emplace(options.seed, options.trainers, train_->size(), options.step_size());
  }
  if (options.is_binary() && classes() != 2) {
    base::bad_data(options.data + ": the number of labels is " + std::to_string(classes()) +
                   "; --task binary needs 2");
  }
  if (!options.valid_data.empty()) valid_ = read(options.valid_data);
  if (!options.test_data.empty()) test_ = read(options.test_data);
}

void HybridData::open_streams(const std::vector<int>& trainers, const Sharing& sharing) {
  const bool is_served = options_.reads_on_rank_0();
  const auto open = [&](int shard, int shards, Words words) {
    data::StreamOptions stream{
        .paths = data::expand_paths(data::split_paths(options_.data)),
        .shard = shard,
        .shards = shards,
        .batch_size = options_.step_size(),
        .epochs = options_.epochs > 0 ? options_.epochs : kNoLimit,
        .shuffle_buffer = options_.shuffle_buffer,
        .seed = options_.seed,
        .bad_rows = options_.bad_rows == "skip" ? data::BadRows::kSkip : data::BadRows::kStop,
        .vocabulary = std::move(words)};
    stream.format = options_.format_of(stream.paths);
    return stream;
  };
  const auto make_common = [&] {
    const data::StreamOptions stream = open(0, 1, nullptr);
    Common made{words_of(stream), stream.format};
    if (is_served) {
      made.server = std::make_shared<data::StreamServer>(open(0, 1, made.words), options_.trainers);
      made.content_key = made.server->content_key();
    }
    return made;
  };
  const Common common = sharing.common ? sharing.common(make_common) : make_common();
  if (!common.words) {
    base::bad_data(options_.data + ": trainer 0 has other data, which it reads into memory");
  }
  words_ = common.words;
  format_ = common.format;
  content_key_ = common.content_key;
  server_ = common.server;
  if (is_served) {
    for (const int trainer : trainers) {
      const auto take_here = [server = server_, trainer](const auto&... range) {
        return base::Future<data::HandedOut>::ready(server->take(trainer, range...));
      };
      served_[trainer] = std::make_unique<data::RemoteStream>(
          sharing.take ? sharing.take(trainer) : data::RemoteStream::Take(take_here));
    }
    return;
  }
  content_key_ = data::Stream(open(trainers[0], options_.trainers, words_)).content_key();
  open_shard_ = [open, words = words_](int shard, int shards) {
    return std::make_shared<data::Stream>(open(shard, shards, words));
  };
}

HybridData::Words HybridData::words_of(const data::StreamOptions& stream) const {
  data::TextVocabulary words{{}, options_.labels, options_.hash_bits};
  if (options_.labels.empty() || options_.hash_bits == 0) {
    // Hashed words need no pass over the data, but the labels must be known.
    const int64_t seen = options_.hash_bits > 0 ? kLabelExamples : kNoLimit;
    words = data::scan_vocabulary(stream.paths, stream.format, options_.hash_bits, stream.bad_rows,
                                  seen);
  }
  std::ranges::sort(words.labels);
  return std::make_shared<const data::TextVocabulary>(std::move(words));
}

HybridData::HybridData(const HybridOptions& options, const job::Snapshot& snapshot,
                       const std::string& examples)
    : options_(options),
      words_(std::make_shared<data::TextVocabulary>(data::TextVocabulary{
          options.hash_bits > 0 ? data::Vocabulary() : data::Vocabulary(snapshot.words("words")),
          snapshot.words("labels"), options.hash_bits})),
      format_(snapshot.state.value("agreed", job::Json::object()).contains("format")
                  ? data::Format::kCriteo
                  : data::Format::kFastText) {
  test_ = read(examples, data::Labels::kSome);
}

void HybridData::agree(job::TrainingPlan& training) const {
  training.agree("rows", rows(), "num_embeddings");
  training.agree("classes", classes(), "classes");
  if (options_.has_teacher()) training.agree("data", options_.data);
  if (words_) {
    training.agree("data", std::to_string(train_ ? train_->content_hash : content_key_));
    if (format_ == data::Format::kCriteo) training.agree("format", "criteo");
    if (!train_) training.agree("--data-from", open_shard_ ? "each" : "rank0");
    if (classes() == 1) training.warn_of_one_label(options_.data, labels()[0]);
    training.keep("",
                  job::part_of_words({{"words", words_->words.all()}, {"labels", words_->labels}}));
  }
  if (valid_) training.alike("valid-data", std::to_string(valid_->content_hash));
  if (test_) training.alike("test-data", std::to_string(test_->content_hash));
}

data::Batch HybridData::batch(const job::Step& step) {
  const base::TraceScope scope("data");
  if (!step.has_data) return data::Batch::empty();
  if (step.source) return step.source->next();
  if (!train_) return bags_.batch(step.shard, step.epoch, step.number);
  return data::make_batch(*train_, sampler_->batch(step.epoch, step.shard, step.number));
}

job::Plan HybridData::plan() const {
  if (!open_shard_ && served_.empty()) {
    return job::Plan::of(options_, sampler_ ? sampler_->steps_per_epoch() : options_.batches);
  }
  job::Plan plan = job::Plan::of_stream(options_, options_.steps_per_epoch);
  plan.average_over_data = options_.average_over == "data";
  if (!open_shard_) plan.reading = job::LeaseScheduler::Reading::kOneStream;
  return plan;
}

void HybridData::evaluate_in(job::TrainingPlan& training,
                             const std::function<at::Tensor(const data::Batch&)>& forward) const {
  const auto of = [&](const data::TextDataset& set) {
    return [this, &set, forward](const job::Share& share) {
      job::Evaluation evaluation;
      each_batch(set, share, [&](const data::Batch& batch) {
        const at::Tensor scores = forward(batch);
        evaluation.add(options_.is_binary() ? job::Evaluation::of_binary(scores, batch.targets)
                                            : job::Evaluation::of(scores, batch.targets));
      });
      return evaluation;
    };
  };
  if (valid_) training.evaluate_epochs(of(*valid_));
  if (test_) training.evaluate_at_end(of(*test_));
}

}  // namespace distrain::scenario
