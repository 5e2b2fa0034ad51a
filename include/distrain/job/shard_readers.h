#pragma once

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "distrain/data/source.h"

namespace distrain::job {

/// The shard of streamed data that a trainer reads from now on.
struct ShardStart {
  int32_t shard = 0;
  int32_t shards = 0;           ///< number of shards in this epoch; 0: the trainer reads none
  data::StreamPosition from{};  ///< the beginning of the next batch, if `skip` is 0
  int64_t skip = 0;             ///< batches after `from` that a lost trainer has trained on
  static constexpr auto kFields =
      std::tuple(&ShardStart::shard, &ShardStart::shards, &ShardStart::from, &ShardStart::skip);
};

/// The shards of streamed data in an epoch, their positions, and the trainers that read them.
///
/// Each epoch begins with one shard for each trainer. A shard has no reader if its trainer was
/// lost, or if the job was resumed with fewer trainers than before. A trainer whose own shard has
/// ended then reads the rest of that shard. If the job was resumed with more trainers than before,
/// some trainers read nothing until the next epoch. So each batch of an epoch is read once,
/// whatever the number of trainers. Not thread-safe.
class ShardReaders {
 public:
  explicit ShardReaders(int trainers) : trainers_(trainers) {
    for (int trainer = 0; trainer < trainers; ++trainer) shards_.push_back({.reader = trainer});
  }

  /// Sets the positions of the shards from a checkpoint of any number of shards. `begins_epoch`: no
  /// step of the epoch has been made.
  void resume(const std::vector<data::StreamPosition>& positions, bool begins_epoch);
  /// Returns the positions of all shards.
  std::vector<data::StreamPosition> positions() const {
    std::vector<data::StreamPosition> all;
    for (const Shard& shard : shards_) all.push_back(shard.position);
    return all;
  }
  /// Returns the shard of `trainer` and its position.
  ShardStart start_of(int trainer) const {
    const size_t shard = shard_of(trainer);
    if (shard == shards_.size()) return {};
    const Shard& its = shards_[shard];
    return {static_cast<int32_t>(shard), static_cast<int32_t>(shards_.size()), its.position,
            its.skip};
  }
  /// Notes that `trainer` is at `position` of its shard, and if `ended`, that the shard has ended.
  void note(int trainer, const data::StreamPosition& position, bool ended) {
    const size_t shard = shard_of(trainer);
    if (shard == shards_.size()) return;
    Shard& its = shards_[shard];
    its.position = position;
    its.ended = its.ended || ended;
    its.skip = 0;
  }
  /// Takes its shard from `trainer`, which has made `steps` with data after the shard's position.
  void leave(int trainer, int64_t steps) {
    const size_t shard = shard_of(trainer);
    if (shard == shards_.size()) return;
    shards_[shard].reader.reset();
    shards_[shard].skip += steps;
  }
  /// Returns the shard to which `trainer` must go now, if any. If it has a shard that has not
  /// ended, it leaves that shard only for one with batches to skip.
  std::optional<ShardStart> move(int trainer) {
    const auto next = shard_for(trainer);
    if (!next) return std::nullopt;
    leave(trainer, 0);
    shards_[*next].reader = trainer;
    return start_of(trainer);
  }
  bool can_move(int trainer) const { return shard_for(trainer).has_value(); }
  /// Returns true if a shard has batches to skip, which its position cannot express.
  bool has_skip() const {
    return std::ranges::any_of(shards_, [](const Shard& shard) { return shard.skip > 0; });
  }
  /// Returns true if the data of all shards has ended in this epoch.
  bool ended() const { return std::ranges::all_of(shards_, &Shard::ended); }
  /// Begins the next epoch. If ended(), with one shard for each trainer again.
  void begin_epoch() {
    if (ended()) return divide();
    for (Shard& shard : shards_) shard.ended = false;
  }

 private:
  struct Shard {
    data::StreamPosition position;
    std::optional<int> reader;
    bool ended = false;
    int64_t skip = 0;
  };
  /// Returns the index of the shard that `trainer` reads; shards_.size() if it reads none.
  size_t shard_of(int trainer) const {
    const auto it = std::ranges::find(shards_, trainer, &Shard::reader);
    return static_cast<size_t>(it - shards_.begin());
  }
  std::optional<size_t> shard_for(int trainer) const;
  void divide();

  const int trainers_;
  std::vector<Shard> shards_;
};

}  // namespace distrain::job
