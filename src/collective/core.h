#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/base/executor.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/channel.h"
#include "operation.h"

namespace distrain::collective {

// An operation's number has its sequence in the upper bits, and counts up within it in the lower.
constexpr int kNumberBits = 40;
constexpr uint64_t first_number(uint32_t sequence) { return uint64_t{sequence} << kNumberBits; }
constexpr uint32_t sequence_of(uint64_t number) {
  return static_cast<uint32_t>(number >> kNumberBits);
}

// Note [Window of a group]
//
// A message for an operation that the receiving peer has not begun stays in that peer's memory. The
// peer's own message for the operation, or for a later one of the sequence, tells that it has
// begun; until then the operation is unanswered. (Two ranks send each other a message in step 0 of
// an operation, or neither does. Step 1 follows messages of all.) An operation is started when, for
// each peer, the bytes of those that it has not answered and its own are at most kWindow / (n - 1),
// or it has answered all. So the peers' messages for operations that a rank has not begun take at
// most kWindow, or one operation of each peer. Whoever calls an operation waits for that room. The
// rank that is last never waits: all others have sent, so that its messages are answers. A peer
// that sends twice as much, which leaves room for refusals, is `overloaded`.
inline constexpr uint64_t kWindow = uint64_t{64} << 20;

/// In place of an operation's number: the sender has closed the group, and sends nothing more.
inline constexpr uint64_t kClosed = UINT64_MAX;

/// One group's sequences of operations, mailbox and pending operations. The handler of the channel
/// lives here; see Note [Life of an operation] for the threads. Outlives the Backend while tasks of
/// the executor still hold operations, but touches the channel only until close().
class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(rpc::Channel& channel, base::Executor& executor, uint32_t group_id, std::vector<int> ranks);

  void open();
  /// Fails what is pending with `cancelled`, and on the other ranks what waits for this one, now or
  /// later; no thread uses the channel when it returns.
  void close();
  /// Fails what is pending with `error`; the group stays usable.
  void abort(const base::Error& error);

  /// Of a sequence that is nobody else's.
  uint32_t new_sequence();
  /// Starts the operation as the sequence's next. Never throws: it fails the operation instead.
  void issue(const std::shared_ptr<Operation>& operation, uint32_t sequence);
  /// Takes the sequence's next `count` numbers; tells other ranks that these fail with `error`.
  void refuse(int count, const base::Error& error, uint32_t sequence);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int world_rank(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  base::Executor& executor() { return executor_; }
  /// Of the sequence that is everybody's.
  uint64_t next_number() const;
  std::optional<base::Error> failure() const;
  const std::shared_ptr<base::Tracer>& tracer() const { return tracer_; }

  /// A buffer of `size` bytes; throws `resources`.
  base::BufferPtr allocate(size_t size);

  /// Sends to group rank `to`. To be called while Starting or Running, without the lock.
  void send(int to, uint64_t number, int step, std::span<const std::span<const uint8_t>> pieces,
            std::shared_ptr<const void> keep_alive);
  /// Sends one and the same buffer to all other ranks.
  void send_to_all(uint64_t number, int step, const base::BufferPtr& buffer);

 private:
  friend class Operation;

  /// A peer in the group, by mutex_.
  struct Peer {
    std::map<uint64_t, uint64_t> unanswered;  // bytes, by number: see Note [Window of a group]
    uint64_t unanswered_bytes = 0;
    uint64_t early_bytes = 0;  // in early_
    bool closed = false;
  };

  void on_message(rpc::ChannelMessage message);
  void on_answer_locked(Peer& peer, uint64_t number);
  void on_closed_locked(int from);
  base::Error closed_error(int from, const Operation& operation) const;
  bool await_room(Operation& operation);
  void send_refusals(uint64_t first, int count, const base::Error& error);
  uint64_t window() const { return kWindow / static_cast<uint64_t>(std::max(size() - 1, 1)); }
  void on_peer_lost(int world_rank, const base::Error& error);
  std::vector<rpc::Wait> waits();
  void post(std::shared_ptr<Operation> operation);
  int group_rank(int world_rank) const;
  /// The number of the next operation of a sequence, to be counted up.
  uint64_t& next_locked(uint32_t sequence);
  bool is_early_locked(uint64_t number) const;
  /// Takes the messages that came before this number was used here.
  std::vector<rpc::ChannelMessage> take_early_locked(uint64_t number);

  rpc::Channel& channel_;
  base::Executor& executor_;
  const std::shared_ptr<base::Tracer> tracer_;
  const uint32_t group_id_;
  const std::vector<int> ranks_;
  int rank_ = -1;
  base::BufferPool pool_;

  mutable std::mutex mutex_;
  uint32_t last_sequence_ = 0;
  std::unordered_map<uint32_t, uint64_t> next_;  // by sequence
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> pending_;
  std::map<uint64_t, std::vector<rpc::ChannelMessage>> early_;
  std::vector<Peer> peers_;             // by group rank
  std::condition_variable room_;        // or the operation that waits for it has failed
  std::optional<base::Error> failure_;  // of the group, for good: a lost rank, or closed
  bool closed_ = false;
  int active_ = 0;  // operations Starting or Running
  std::condition_variable idle_;
};

}  // namespace distrain::collective
