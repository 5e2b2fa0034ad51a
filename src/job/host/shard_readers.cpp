#include "distrain/job/shard_readers.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace distrain::job {

ShardReaders::ShardReaders(int trainers) : shard_of_(static_cast<size_t>(trainers)) {
  std::iota(shard_of_.begin(), shard_of_.end(), 0);
  for (int trainer = 0; trainer < trainers; ++trainer) shards_.push_back({.reader = trainer});
}

void ShardReaders::resume(const std::vector<data::StreamPosition>& positions, bool begins_epoch) {
  shards_.clear();
  for (const data::StreamPosition& position : positions) shards_.push_back({.position = position});
  for (size_t i = 0; i < shard_of_.size(); ++i) {
    shard_of_[i] = i < shards_.size() ? static_cast<int>(i) : -1;
    if (i < shards_.size()) shards_[i].reader = static_cast<int>(i);
  }
  if (begins_epoch && shards_.size() != shard_of_.size()) divide();
}

std::vector<data::StreamPosition> ShardReaders::positions() const {
  std::vector<data::StreamPosition> all;
  for (const Shard& shard : shards_) all.push_back(shard.position);
  return all;
}

ShardReaders::Shard* ShardReaders::shard_of(int trainer) {
  const int shard = shard_of_[static_cast<size_t>(trainer)];
  return shard < 0 ? nullptr : &shards_[static_cast<size_t>(shard)];
}

ShardStart ShardReaders::start_of(int trainer) const {
  const int shard = shard_of_[static_cast<size_t>(trainer)];
  if (shard < 0) return {};
  const Shard& its = shards_[static_cast<size_t>(shard)];
  return {shard, static_cast<int32_t>(shards_.size()), its.position, its.skip};
}

void ShardReaders::note(int trainer, const data::StreamPosition& position, bool ended) {
  Shard* const its = shard_of(trainer);
  if (!its) return;
  its->position = position;
  its->ended = its->ended || ended;
  its->skip = 0;
}

void ShardReaders::leave(int trainer, int64_t steps) {
  if (Shard* const its = shard_of(trainer)) {
    its->reader.reset();
    its->skip += steps;
  }
  shard_of_[static_cast<size_t>(trainer)] = -1;
}

std::optional<size_t> ShardReaders::shard_for(int trainer) const {
  const int own = shard_of_[static_cast<size_t>(trainer)];
  const bool is_free = own < 0 || shards_[static_cast<size_t>(own)].ended;
  std::optional<size_t> found;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Shard& shard = shards_[i];
    if (shard.reader || shard.ended) continue;
    if (shard.skip > 0) return i;
    if (is_free && (!found || static_cast<int>(i) == trainer)) found = i;
  }
  return found;
}

std::optional<ShardStart> ShardReaders::move(int trainer) {
  const auto next = shard_for(trainer);
  if (!next) return std::nullopt;
  leave(trainer, 0);
  shards_[*next].reader = trainer;
  shard_of_[static_cast<size_t>(trainer)] = static_cast<int>(*next);
  return start_of(trainer);
}

bool ShardReaders::has_skip() const {
  return std::ranges::any_of(shards_, [](const Shard& shard) { return shard.skip > 0; });
}

bool ShardReaders::ended() const { return std::ranges::all_of(shards_, &Shard::ended); }

void ShardReaders::begin_epoch() {
  if (ended()) return divide();
  for (Shard& shard : shards_) shard.ended = false;
}

// Gives each trainer the shard with its own number, from the beginning of the next pass over the
// data. A trainer that has read its own shard to the end begins that pass without being told.
void ShardReaders::divide() {
  int64_t pass = 1;
  for (const Shard& shard : shards_) {
    const data::StreamPosition& at = shard.position;
    const bool is_unread = at == data::StreamPosition{.epoch = at.epoch};
    pass = std::max(pass, is_unread ? at.epoch : at.epoch + 1);
  }
  const std::vector<Shard> before = std::exchange(shards_, {});
  for (size_t i = 0; i < shard_of_.size(); ++i) {
    const bool goes_on =
        before.size() == shard_of_.size() && shard_of_[i] == static_cast<int>(i) && before[i].ended;
    // With a number of steps per epoch, shards that all end in one epoch may be in different
    // passes.
    shards_.push_back({.position = {.epoch = goes_on ? before[i].position.epoch + 1 : pass}});
    if (goes_on) {
      shards_.back().reader = static_cast<int>(i);
    } else {
      shard_of_[i] = -1;
    }
  }
}

}  // namespace distrain::job
