#include "distrain/job/shard_readers.h"

namespace distrain::job {

void ShardReaders::resume(const std::vector<data::StreamPosition>& positions, bool begins_epoch) {
  shards_.clear();
  for (const data::StreamPosition& position : positions) {
    const auto number = static_cast<int>(shards_.size());
    Shard& shard = shards_.emplace_back(Shard{.position = position});
    if (number < trainers_) shard.reader = number;
  }
  if (begins_epoch && std::ssize(shards_) != trainers_) divide();
}

std::optional<size_t> ShardReaders::shard_for(int trainer) const {
  const size_t own = shard_of(trainer);
  const bool is_free = own == shards_.size() || shards_[own].ended;
  std::optional<size_t> found;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Shard& shard = shards_[i];
    if (shard.reader || shard.ended) continue;
    if (shard.skip > 0) return i;
    if (is_free && (!found || static_cast<int>(i) == trainer)) found = i;
  }
  return found;
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
  std::vector<Shard> before(static_cast<size_t>(trainers_));
  if (shards_.size() == before.size()) before.swap(shards_);
  shards_.clear();
  for (int trainer = 0; trainer < trainers_; ++trainer) {
    const Shard& own = before[static_cast<size_t>(trainer)];
    if (own.reader == trainer && own.ended) {
      // With a number of steps per epoch, shards that all end in one epoch may be in different
      // passes.
      shards_.push_back({.position = {.epoch = own.position.epoch + 1}, .reader = trainer});
    } else {
      shards_.push_back({.position = {.epoch = pass}});
    }
  }
}

}  // namespace distrain::job
