#include "distrain/data/stream.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "example_parser.h"
#include "lines.h"
#include "source_files.h"

namespace distrain::data {

namespace {

constexpr int64_t kMaxShuffleBuffer = int64_t{1} << 31;
// Selects the sequence of random numbers for shuffling, as kShuffleSequence does for Sampler.
constexpr uint64_t kBlockSequence = 4;
// The examples of a block if blocks are not shuffled. A position does not depend on the batch size.
constexpr int64_t kOrderedBlock = 1024;
// A block ends early with this number of tokens (256 MiB), so that long examples cannot exhaust the
// memory.
constexpr size_t kMaxBlockTokens = size_t{1} << 25;

// Removes all examples, but keeps the memory.
void clear(Examples& examples) {
  examples.tokens.clear();
  examples.offsets.assign(1, 0);
  examples.labels.clear();
  examples.numbers.clear();
  examples.dropped_tokens = 0;
}

}  // namespace

/// The facts of a stream that do not change.
struct Plan {
  StreamOptions options;
  std::vector<SourceFile> files;
  std::vector<Piece> pieces;  // of the shard
};

/// Consecutive examples of a shard, and the order in which they are returned.
struct Block {
  StreamPosition begin, end;  // `end` is the beginning of the next block
  Examples examples;
  std::vector<uint32_t> order;  // of the examples
  bool last = false;            // of the epoch
  bool counted = false;         // in Stream::Counts
  int64_t bad_rows = 0;
  std::string first_bad_row;

  int64_t size() const { return std::ssize(order); }
};

/// Reads the blocks of an epoch one after the other. Used by the thread of a stream.
class BlockReader {
 public:
  BlockReader(const Plan& plan, const store::Interrupt& interrupt, const StreamPosition& position)
      : plan_(plan),
        waiting_{&interrupt, plan.options.pipe_writer_limit},
        parser_(plan.options.format, plan.options.vocabulary),
        next_(position),
        from_begin_(position == StreamPosition{.epoch = position.epoch}) {}

  /// Returns the next block, in the memory of `used` examples, which are removed. Call it until it
  /// has returned the last block. Throws as Stream::ready().
  Block next(Examples used);

 private:
  std::optional<std::string_view> next_line();
  void add_bad_row(Block& block, const BadRow& row);
  void shuffle(Block& block) const;
  void check_any_example();

  const Plan& plan_;
  const store::InputFile::Waiting waiting_;
  ExampleParser parser_;
  StreamPosition next_;              // the beginning of the next block
  bool from_begin_;                  // reading has started at the beginning of the epoch
  std::optional<LineReader> lines_;  // of the piece next_.piece, if it is open
  int64_t examples_ = 0;             // of the blocks so far
  std::string first_bad_row_;
};

Block BlockReader::next(Examples used) {
  const int64_t size = plan_.options.shuffle_buffer;
  Block block{.examples = std::move(used)};
  clear(block.examples);
  block.begin = next_;
  block.counted = std::exchange(next_.used, 0) > 0;
  while (std::ssize(block.examples.labels) < (size > 0 ? size : kOrderedBlock) &&
         block.examples.tokens.size() < kMaxBlockTokens) {
    const auto line = next_line();
    if (!line) {
      block.last = true;
      break;
    }
    try {
      parser_.parse(*line, block.examples);
    } catch (const BadRow& row) {
      add_bad_row(block, row);
    }
  }
  if (lines_) {
    const Piece& piece = plan_.pieces[static_cast<size_t>(next_.piece)];
    next_.offset = static_cast<int64_t>(lines_->offset() - piece.begin);
  }
  ++next_.block;
  block.end = next_;
  examples_ += std::ssize(block.examples.labels);
  if (block.last && from_begin_ && examples_ == 0) check_any_example();
  shuffle(block);
  if (block.begin.used > block.size()) {
    base::bad_data(
        names_of(plan_.files) + ": not the data of the checkpoint: a block has " +
        fmt::format("{} examples, of which {} were used", block.size(), block.begin.used));
  }
  return block;
}

// Returns nullopt at the end of the last piece.
std::optional<std::string_view> BlockReader::next_line() {
  for (; next_.piece < std::ssize(plan_.pieces); ++next_.piece, next_.offset = 0) {
    const Piece& piece = plan_.pieces[static_cast<size_t>(next_.piece)];
    if (!lines_) {
      lines_.emplace(plan_.files[piece.file], piece.begin + static_cast<uint64_t>(next_.offset),
                     piece.end, waiting_);
    }
    if (auto line = lines_->next()) return line;
    lines_.reset();
  }
  return std::nullopt;
}

// Finds the place of the first bad row only, because that may take a pass over the file.
void BlockReader::add_bad_row(Block& block, const BadRow& row) {
  const bool stop = plan_.options.bad_rows == BadRows::kStop;
  if (stop || (first_bad_row_.empty() && !block.counted)) {
    first_bad_row_ = block.first_bad_row = lines_->place(row.at) + ": " + row.reason;
  }
  if (stop) base::bad_data(first_bad_row_);
  ++block.bad_rows;
}

void BlockReader::shuffle(Block& block) const {
  block.order.resize(block.examples.labels.size());
  std::iota(block.order.begin(), block.order.end(), 0U);
  if (plan_.options.shuffle_buffer == 0) return;
  base::Random random({plan_.options.seed, kBlockSequence, static_cast<uint64_t>(next_.epoch),
                       static_cast<uint64_t>(plan_.options.shard),
                       static_cast<uint64_t>(block.begin.block)});
  for (size_t left = block.order.size(); left > 1; --left) {
    std::swap(block.order[left - 1], block.order[random.below(left)]);
  }
}

// Called for a shard without examples. Throws if the other shards have none either.
void BlockReader::check_any_example() {
  Examples examples;
  for (size_t i = 0; plan_.options.shards > 1 && i < plan_.files.size(); ++i) {
    LineReader lines(plan_.files[i], 0, Piece::kToEnd, waiting_);
    while (const auto line = lines.next()) {
      try {
        if (parser_.parse(*line, examples)) return;
      } catch (const BadRow& row) {
        if (first_bad_row_.empty()) first_bad_row_ = lines.place(row.at) + ": " + row.reason;
      }
    }
  }
  base::bad_data(names_of(plan_.files) + ": no example" +
                 (first_bad_row_.empty() ? "" : "; the first bad row is " + first_bad_row_));
}

// The reading thread appends blocks; the thread that calls the stream removes them from the front.
struct Stream::State {
  State(StreamOptions options, std::vector<SourceFile> files);
  ~State() { stop(); }

  void stop();
  void start(const StreamPosition& from);
  bool continue_with(const StreamPosition& next);
  void read(const StreamPosition& from);
  bool await(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit);
  int64_t wait_for_batch(std::unique_lock<std::mutex>& lock);
  void drop_first_block();
  void count(Block& block);
  Batch take(int64_t size);

  int64_t unused() const {
    int64_t size = blocks.empty() ? 0 : -used;
    for (const Block& block : blocks) size += is_current(block) ? block.size() : 0;
    return size;
  }
  bool is_current(const Block& block) const { return block.begin.epoch == position.epoch; }
  // Returns true if the thread may read one more block.
  bool has_room() const {
    return blocks.size() < 2 || (unused() < plan.options.batch_size && !ended);
  }
  // Returns true if the thread goes on with `epoch` after the epoch before.
  bool reads_on(int64_t epoch) const {
    return epoch <= plan.options.epochs &&
           std::ranges::count(plan.files, SourceFile::Kind::kPipe, &SourceFile::kind) == 0;
  }

  Plan plan;
  uint64_t content_key = 0;
  // Used by the thread that calls the stream.
  std::optional<store::Interrupt> interrupt;  // ends `thread`
  std::thread thread;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<Block> blocks;   // the first of them is in use; then of this epoch, then of the next
  Examples used_up;           // the last block that was removed; its memory is used again
  bool ended = false;         // the last block of the epoch has been appended
  std::exception_ptr error;   // ended the thread
  int64_t used = 0;           // examples of the first block that were returned
  StreamPosition position{};  // after the last batch
  Counts counts;
};

Stream::State::State(StreamOptions options, std::vector<SourceFile> found)
    : plan{std::move(options), std::move(found), {}}, content_key(inspect(plan.files)) {
  plan.pieces = pieces_of_shard(plan.files, plan.options.shard, plan.options.shards);
}

void Stream::State::stop() {
  if (!thread.joinable()) return;
  interrupt->set();
  {
    std::lock_guard lock(mutex);  // the thread sees the signal or waits for `changed`
  }
  changed.notify_all();
  thread.join();
}

void Stream::State::start(const StreamPosition& from) {
  stop();
  blocks.clear();
  ended = false;
  error = nullptr;
  position = from;
  used = from.used;
  interrupt.emplace();
  try {
    thread = std::thread([this, from] {
      pthread_setname_np(pthread_self(), "data reader");
      // Reading is ahead of training, so it should take idle time rather than that of training.
      setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 5);
      read(from);
    });
  } catch (const std::system_error& e) {
    throw base::Exception(base::ErrorKind::kResources,
                          std::string("no thread to read data: ") + e.what());
  }
}

void Stream::State::read(const StreamPosition& from) {
  std::exception_ptr failure;
  try {
    StreamPosition at = from;
    Examples memory;
    do {
      BlockReader reader(plan, *interrupt, at);
      for (bool last = false; !last;) {
        Block block = reader.next(std::move(memory));
        last = block.last;
        std::unique_lock lock(mutex);
        ended = ended || (last && is_current(block));
        blocks.push_back(std::move(block));
        changed.notify_all();
        changed.wait(lock, [&] { return interrupt->is_set() || has_room(); });
        if (interrupt->is_set()) return;
        memory = std::move(used_up);
      }
      at = {.epoch = at.epoch + 1};
    } while (reads_on(at.epoch));
    return;
  } catch (...) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex);
  error = std::move(failure);
  changed.notify_all();
}

// Waits until the next batch is in memory or will not come. Returns false after `limit`.
bool Stream::State::await(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit) {
  const auto is_known = [&] { return unused() >= plan.options.batch_size || ended || error; };
  if (is_known()) return true;
  const base::TimePoint start = base::Clock::now();
  const bool known = changed.wait_for(lock, limit, is_known);
  counts.waited_s += base::seconds_since(start);
  return known;
}

// Returns true if `next` is the beginning of the epoch in which the thread reads already.
bool Stream::State::continue_with(const StreamPosition& next) {
  std::lock_guard lock(mutex);
  if (!ended || next != StreamPosition{.epoch = position.epoch + 1} || !reads_on(next.epoch) ||
      (!blocks.empty() && is_current(blocks.front()))) {
    return false;
  }
  position = next;
  ended = std::ranges::any_of(blocks, [&](auto& each) { return each.last && is_current(each); });
  changed.notify_all();
  return true;
}

// Returns the number of batches that are in memory, and 0 at the end of the epoch.
int64_t Stream::State::wait_for_batch(std::unique_lock<std::mutex>& lock) {
  if (!interrupt) base::invalid("Stream::begin() was not called");
  const int64_t size = plan.options.batch_size;
  while (!await(lock, std::chrono::hours(1))) {
  }
  const int64_t batches = (unused() + (ended ? size - 1 : 0)) / size;
  if (batches == 0 && error && !ended) std::rethrow_exception(error);
  // Only blocks without examples are left, of which the bad rows were not counted yet.
  while (batches == 0 && !blocks.empty() && is_current(blocks.front())) drop_first_block();
  return batches;
}

void Stream::State::drop_first_block() {
  count(blocks.front());
  position = blocks.front().end;
  used_up = std::move(blocks.front().examples);
  used = 0;
  blocks.pop_front();
}

void Stream::State::count(Block& block) {
  if (std::exchange(block.counted, true)) return;
  counts.bad_rows += block.bad_rows;
  counts.dropped_tokens += block.examples.dropped_tokens;
  if (counts.first_bad_row.empty()) counts.first_bad_row = block.first_bad_row;
}

// Returns the next `size` examples, which are in memory.
Batch Stream::State::take(int64_t size) {
  const auto for_each = [&](auto function) {
    int64_t left = size, i = used;
    for (const Block& block : blocks) {
      for (; left > 0 && i < block.size(); ++i, --left) {
        function(block.examples, block.order[static_cast<size_t>(i)]);
      }
      i = 0;
    }
  };
  int64_t tokens = 0;
  for_each(
      [&](const Examples& from, size_t i) { tokens += from.offsets[i + 1] - from.offsets[i]; });
  Batch batch{at::empty({tokens}, at::kLong), at::empty({size}, at::kLong),
              at::empty({size}, at::kLong)};
  const bool criteo = plan.options.format == Format::kCriteo;
  if (criteo) batch.numbers = at::empty({size, kCriteoNumbers}, at::kFloat);
  auto* const indices = batch.indices.mutable_data_ptr<int64_t>();
  auto* offset = batch.offsets.mutable_data_ptr<int64_t>();
  auto* target = batch.targets.mutable_data_ptr<int64_t>();
  auto* number = criteo ? batch.numbers.mutable_data_ptr<float>() : nullptr;
  auto* index = indices;
  for_each([&](const Examples& from, size_t i) {
    *offset++ = index - indices;
    *target++ = from.labels[i];
    index = std::copy(from.tokens.begin() + from.offsets[i],
                      from.tokens.begin() + from.offsets[i + 1], index);
    if (criteo) {
      number = std::copy_n(from.numbers.begin() + static_cast<int64_t>(i) * kCriteoNumbers,
                           kCriteoNumbers, number);
    }
  });
  for (int64_t left = size; left > 0;) {
    Block& first = blocks.front();
    const int64_t taken = std::min(left, first.size() - used);
    left -= taken;
    used += taken;
    count(first);
    position = first.begin;
    position.used = used;
    if (used == first.size()) drop_first_block();
  }
  counts.examples += size;
  return batch;
}

Stream::Stream(StreamOptions options) {
  const auto check = [](bool right, const char* what, auto value) {
    if (!right) base::invalid(fmt::format("{}, not {}", what, value));
  };
  check(!options.paths.empty(), "a stream needs at least one file", 0);
  check(options.shards >= 1, "the number of shards must be at least 1", options.shards);
  check(options.shard >= 0 && options.shard < options.shards, "the shard must be in [0, shards)",
        options.shard);
  check(options.batch_size >= 1, "the batch size must be at least 1", options.batch_size);
  check(options.shuffle_buffer >= 0 && options.shuffle_buffer <= kMaxShuffleBuffer,
        "the shuffle buffer must have 0 to 2^31 examples", options.shuffle_buffer);
  if (!options.vocabulary) base::invalid("a stream needs a vocabulary");
  if (options.format == Format::kCriteo && options.vocabulary->hash_bits == 0) {
    base::invalid("Criteo data needs hash_bits above 0");
  }
  std::vector<SourceFile> files = find_sources(options.paths);
  state_ = std::make_unique<State>(std::move(options), std::move(files));
}

Stream::~Stream() = default;

void Stream::begin(const StreamPosition& position) {
  const Plan& plan = state_->plan;
  const auto [epoch, piece, offset, block, used] = position;
  if (std::min({piece, offset, block, used}) < 0 || piece > std::ssize(plan.pieces)) {
    base::bad_data(
        fmt::format("the stream has no position in piece {} at byte {}, block {}, example {}",
                    piece, offset, block, used));
  }
  if (state_->interrupt && std::ranges::count(plan.options.paths, "-") > 0) {
    base::bad_data("the standard input can be read only once: give a file, or one epoch");
  }
  if (!state_->continue_with(position)) state_->start(position);
}

bool Stream::await(std::chrono::milliseconds limit) {
  std::unique_lock lock(state_->mutex);
  return state_->await(lock, limit);
}

bool Stream::has_one_pass() const {
  return std::ranges::count(state_->plan.files, SourceFile::Kind::kPipe, &SourceFile::kind) > 0;
}

int64_t Stream::ready() {
  std::unique_lock lock(state_->mutex);
  return state_->wait_for_batch(lock);
}

Batch Stream::next() {
  std::unique_lock lock(state_->mutex);
  if (state_->wait_for_batch(lock) == 0) base::invalid("the epoch has no further batch");
  Batch batch = state_->take(std::min(state_->plan.options.batch_size, state_->unused()));
  state_->changed.notify_all();
  return batch;
}

StreamPosition Stream::position() const {
  std::lock_guard lock(state_->mutex);
  return state_->position;
}

Source::Counts Stream::counts() const {
  std::lock_guard lock(state_->mutex);
  return state_->counts;
}

uint64_t Stream::content_key() const { return state_->content_key; }

TextDataset read_examples(const std::string& path, Format format,
                          std::shared_ptr<const TextVocabulary> vocabulary, Labels labels) {
  if (format == Format::kFastText) return read_fast_text(path, std::move(vocabulary), labels);
  StreamOptions options{.paths = {path}, .format = format, .shuffle_buffer = 0};
  options.vocabulary = vocabulary;
  Stream stream(std::move(options));
  TextDataset all;
  for (stream.begin({}); stream.ready() > 0;) append_batch(all, stream.next());
  all.dropped_tokens = stream.counts().dropped_tokens;
  all.content_hash = stream.content_key();
  all.vocabulary = std::move(vocabulary);
  return all;
}

}  // namespace distrain::data
