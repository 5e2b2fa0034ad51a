#include "distrain/data/remote_stream.h"

#include <algorithm>
#include <utility>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/thread_state.h"

namespace distrain::data {

namespace {

constexpr int64_t kBatchesAtOnce = 16;                   // in one request
constexpr auto kPause = std::chrono::milliseconds(100);  // between looks for stop()

}  // namespace

HandedOut StreamServer::take(int trainer, const StreamPosition& from, int64_t first,
                             int64_t count) {
  const auto index = static_cast<size_t>(trainer);
  const base::BlockingScope waits_for_data;
  std::lock_guard lock(mutex_);
  if (first == 0 && from_ != from) {
    stream_.begin(from);
    from_ = from;
    rounds_.clear();
    first_round_ = 0;
    ended_ = false;
  }
  if (index >= trainers_ || from_ != from || first < first_round_) {
    base::invalid("a trainer asks for batches that are not handed out now");
  }
  HandedOut handed;
  for (int64_t number = first; number < first + count && !handed.ended; ++number) {
    while (!ended_ && first_round_ + std::ssize(rounds_) <= number) read_round();
    const int64_t at = number - first_round_;
    Round* const round = at < std::ssize(rounds_) ? &rounds_[static_cast<size_t>(at)] : nullptr;
    handed.ended = !round || !round->batches[index];
    if (handed.ended) break;
    handed.batches.emplace_back(*std::exchange(round->batches[index], std::nullopt), round->after);
  }
  // A last round that is not full stays, because trainers without a batch ask for it later.
  const auto is_taken = [](const Round& round) {
    return round.is_full &&
           std::ranges::none_of(round.batches, [](const auto& batch) { return batch.has_value(); });
  };
  for (; !rounds_.empty() && is_taken(rounds_.front()); ++first_round_) rounds_.pop_front();
  const Source::Counts counts = trainer == 0 ? stream_.counts() : Source::Counts();
  handed.has_one_pass = stream_.has_one_pass();
  handed.bad_rows = counts.bad_rows;
  handed.first_bad_row = counts.first_bad_row;
  return handed;
}

void StreamServer::read_round() {
  Round round;
  const auto has_next = [this] {
    while (!stopped_ && !stream_.await(kPause)) {
    }
    if (stopped_) {
      throw base::Exception(base::ErrorKind::kCancelled, "no data is handed out any more");
    }
    return stream_.ready() > 0;
  };
  while (round.batches.size() < trainers_ && has_next()) {
    round.batches.emplace_back(stream_.next());
  }
  round.is_full = round.batches.size() == trainers_;
  ended_ = !round.is_full;
  if (round.batches.empty()) return;
  round.batches.resize(trainers_);
  round.after = stream_.position();
  rounds_.push_back(std::move(round));
}

void RemoteStream::begin(const StreamPosition& position) {
  from_ = position_ = position;
  asked_ = 0;
  ahead_.clear();
  ended_ = false;
  ask();
}

void RemoteStream::ask() {
  pending_ = take_(from_, asked_, kBatchesAtOnce);
  asked_ += kBatchesAtOnce;
}

// Waits for the request under way.
void RemoteStream::receive() {
  const base::TimePoint start = base::Clock::now();
  HandedOut handed = std::exchange(pending_, std::nullopt)->wait();
  counts_.waited_s += base::seconds_since(start);
  counts_.bad_rows = handed.bad_rows;
  counts_.first_bad_row = std::move(handed.first_bad_row);
  ahead_.insert(ahead_.end(), std::move_iterator(handed.batches.begin()),
                std::move_iterator(handed.batches.end()));
  ended_ = handed.ended;
  has_one_pass_ = handed.has_one_pass;
}

bool RemoteStream::await(std::chrono::milliseconds limit) {
  if (!ahead_.empty() || !pending_) return true;
  const base::TimePoint start = base::Clock::now();
  const bool done = pending_->wait_until(base::deadline_after(limit));
  counts_.waited_s += base::seconds_since(start);
  return done;
}

int64_t RemoteStream::ready() {
  if (pending_ && (ahead_.empty() || pending_->done())) receive();
  if (!pending_ && !ended_ && std::ssize(ahead_) <= kBatchesAtOnce / 2) ask();
  return std::ssize(ahead_);
}

Batch RemoteStream::next() {
  if (ready() == 0) base::invalid("the epoch has no further batch");
  Batch batch = std::move(ahead_.front().first);
  position_ = ahead_.front().second;
  ahead_.pop_front();
  counts_.examples += batch.size();
  return batch;
}

}  // namespace distrain::data
