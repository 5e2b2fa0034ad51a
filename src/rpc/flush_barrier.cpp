#include "flush_barrier.h"

#include <string>

#include "list_ranks.h"

namespace distrain::rpc {

bool FlushBarrier::complete_locked(const Round& round) const {
  return round.promise && round.arrived.size() == round.others;
}

uint64_t FlushBarrier::sum(const Round& round) {
  uint64_t total = round.own;
  for (const auto& [rank, number] : round.arrived) total += number;
  return total;
}

base::Future<uint64_t> FlushBarrier::enter(uint64_t round, uint64_t number, int world_size) {
  std::lock_guard lock(mutex_);
  if (failed_) return base::Future<uint64_t>::failed(*failed_);
  if (left_) {
    return base::Future<uint64_t>::failed(base::Error{
        base::ErrorKind::kPeerLost,
        "rank " + std::to_string(*left_) + " is lost: it went in the middle of the shutdown",
        *left_, "shutdown"});
  }
  latest_ = round;
  Round& state = rounds_[round];
  state.promise.emplace();
  state.own = number;
  state.others = static_cast<size_t>(world_size - 1);
  state.since = base::Clock::now();
  base::Future<uint64_t> future = state.promise->future();
  if (complete_locked(state)) state.promise->set(sum(state));  // nobody waits for it yet
  return future;
}

void FlushBarrier::on_flush(uint64_t round, int from, uint64_t number) {
  std::optional<base::Promise<uint64_t>> done;
  uint64_t total = 0;
  {
    std::lock_guard lock(mutex_);
    Round& state = rounds_[round];
    state.arrived[from] = number;
    if (!complete_locked(state)) return;
    total = sum(state);
    done = std::move(state.promise);
    state.promise.reset();
  }
  done->set(total);
}

void FlushBarrier::fail(const base::Error& error) {
  std::vector<base::Promise<uint64_t>> open;
  {
    std::lock_guard lock(mutex_);
    if (!failed_) failed_ = error;
    for (auto& [number, round] : rounds_) {
      if (round.promise) open.push_back(std::move(*round.promise));
      round.promise.reset();
    }
  }
  for (auto& promise : open) promise.fail(error);
}

bool FlushBarrier::on_left(int rank) {
  std::lock_guard lock(mutex_);
  if (latest_ == 0) return false;
  const auto it = rounds_.find(latest_);
  if (it == rounds_.end() || !it->second.arrived.contains(rank)) return false;
  left_ = rank;
  return true;
}

std::vector<int> FlushBarrier::missing(uint64_t round, int own_rank, int world_size) const {
  std::lock_guard lock(mutex_);
  return missing_locked(round, own_rank, world_size);
}

std::optional<Wait> FlushBarrier::wait(int own_rank) const {
  std::lock_guard lock(mutex_);
  const auto it = rounds_.find(latest_);
  if (it == rounds_.end() || !it->second.promise || complete_locked(it->second))
    return std::nullopt;
  const int world_size = static_cast<int>(it->second.others) + 1;
  return Wait{"the end of rank " + list_ranks(missing_locked(latest_, own_rank, world_size)),
              it->second.since};
}

std::vector<int> FlushBarrier::missing_locked(uint64_t round, int own_rank, int world_size) const {
  const auto it = rounds_.find(round);
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    if (rank == own_rank) continue;
    if (it == rounds_.end() || !it->second.arrived.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace distrain::rpc
