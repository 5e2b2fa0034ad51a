#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/rpc/channel.h"

namespace distrain::rpc {

/// The rounds of a shutdown. In each round every rank tells every other one a number; the round is
/// over for a rank when it has them all, and all ranks then know the same sum. As connections keep
/// their order, all that was sent before a round has arrived when it is over. Thread-safe.
class FlushBarrier {
 public:
  /// This rank enters `round`; done, with the sum of all numbers, when all have.
  base::Future<uint64_t> enter(uint64_t round, uint64_t number, int world_size);
  void on_flush(uint64_t round, int from, uint64_t number);
  /// Fails the round under way and all later ones.
  void fail(const base::Error& error);
  /// `rank` has closed its connection. False if it cannot have seen the end of the latest round: it
  /// is lost then. If that round turns out not to be the last, the next one fails.
  bool on_left(int rank);
  /// Ranks but this one that have not come to `round`.
  std::vector<int> missing(uint64_t round, int own_rank, int world_size) const;
  /// For those that have not come to the latest round, if this rank has and any is missing.
  std::optional<Wait> wait(int own_rank) const;

 private:
  struct Round {
    std::map<int, uint64_t> arrived;
    std::optional<base::Promise<uint64_t>> promise;  // once this rank is in
    uint64_t own = 0;
    size_t others = 0;
    base::TimePoint since;
  };
  std::vector<int> missing_locked(uint64_t round, int own_rank, int world_size) const;
  bool complete_locked(const Round& round) const;
  static uint64_t sum(const Round& round);

  mutable std::mutex mutex_;
  std::map<uint64_t, Round> rounds_;
  uint64_t latest_ = 0;
  std::optional<base::Error> failed_;
  std::optional<int> left_;  // a rank that took the latest round for the last
};

}  // namespace distrain::rpc
