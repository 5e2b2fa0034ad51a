#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/util/StringUtil.h>

#include "distrain/base/buffer.h"
#include "distrain/base/executor.h"
#include "distrain/base/trace.h"
#include "distrain/rpc/channel.h"
#include "operation.h"
#include "shared_space.h"

namespace distrain::collective {

// An operation's number has its sequence in the upper bits and a counter in the lower kNumberBits.
constexpr int kNumberBits = 40;
constexpr uint64_t first_number(uint32_t sequence) { return uint64_t{sequence} << kNumberBits; }
constexpr uint32_t sequence_of(uint64_t number) {
  return static_cast<uint32_t>(number >> kNumberBits);
}

// Note [Numbers of transfers]
//
// A send and its recv are matched by their peer, tag and order, not by the order of the group's
// operations. So the transfers with one peer, direction and tag are a sequence of their own, which
// each rank numbers for itself, from kTransfers on. On the wire, a transfer has the sequence
// kTransfers, and its tag and direction are in ChannelTag::c beside the step. All messages of a
// transfer, also a refusal, go to its peer only. The window of the group does not count transfers,
// because a send waits until the recv asks for the data.
inline constexpr uint32_t kTransfers = uint32_t{1} << 23;
inline constexpr uint32_t kMostTransferSequences = uint32_t{1} << 20;
constexpr bool is_transfer(uint64_t number) {
  return sequence_of(number) - kTransfers < kMostTransferSequences;
}

// Note [Window of a group]
//
// A message for an operation that the receiver has not begun stays in the receiver's memory. A peer
// answers an operation by its own message for that operation or a later one of the sequence, which
// shows that the peer has begun it. (Two ranks send each other a message in step 0, or neither
// does, except in rooted allreduces, where rank 0 answers in step 1. Step 1 follows messages of all
// ranks. A root and another rank both send: if there is no data for a rank, it gets a header. Over
// hosts, a rank that fails before it has sent something to all partners sends them its error.) A
// call waits until each peer has answered all operations, or until the unanswered operations and
// the new one have at most kWindow / (n - 1) bytes. So early messages on a rank take at most
// kWindow bytes or, if that is more, one operation of each peer. The slowest rank never waits,
// because the other ranks' answers have already come. If a peer's early messages exceed twice its
// share, which leaves room for refusals, the group fails with `overloaded`. Transfers are not in
// the window, so a peer has twice kWindow for the headers of its early recvs.
inline constexpr uint64_t kWindow = uint64_t{64} << 20;

// Note [Closing a group]
//
// A rank that closes the group notifies group rank 0 and the ranks with which it has exchanged
// messages, so that closing connects no more ranks. Then its channel answers each other rank's
// message by kClosed. A rank other than 0 sends a message to each rank whose answer it needs. In
// shared memory, it sends kLook to the ranks for which an operation that began kPatience ago waits.
inline constexpr std::chrono::seconds kPatience{2};

/// The operation number in the messages of a rank that has closed the group.
inline constexpr uint64_t kClosed = UINT64_MAX;
/// Tells the receiver to look at the marks in shared memory. Also used in Note [Closing a group].
inline constexpr uint64_t kLook = UINT64_MAX - 1;
/// Agrees on shared memory: the step is a SharingStep.
inline constexpr uint64_t kSharing = UINT64_MAX - 2;
enum class SharingStep : uint8_t { kOffer, kAccept, kDecline, kUse, kUseNone };

/// The state of a group: its sequences, early messages and pending operations. Handles the
/// channel's messages; see Note [Life of an operation] for the threads. May outlive the Backend
/// while tasks of the executor hold operations, but does not use the channel after close().
class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(rpc::Channel& channel, base::Executor& executor, uint32_t group_id, std::vector<int> ranks,
       bool shares_memory);

  void open();
  /// Fails pending operations with `cancelled` and notifies the other ranks, so that their
  /// operations that need this rank fail. Then only the channel's handler uses the channel.
  void close();
  /// Fails pending operations with `error`; the group stays usable.
  void abort(const base::Error& error);

  uint32_t new_sequence() {
    std::lock_guard lock(mutex_);
    return ++last_sequence_;
  }
  /// Starts `operation` as the next of its sequence. Never throws; fails the operation instead.
  /// With `cannot_begin` only takes its number, and fails it with that error on all ranks.
  void issue(const std::shared_ptr<Operation>& operation, uint32_t sequence,
             std::optional<base::Error> cannot_begin = std::nullopt);
  /// Skips the sequence's next `count` operations and sends `error` for each to the other ranks.
  void refuse(int count, const base::Error& error, uint32_t sequence);

  /// The transfers that form a sequence; `sends` is true on the rank that sends the data.
  struct TransferKey {
    int peer = 0;
    bool sends = false;
    uint32_t tag = 0;
    friend auto operator<=>(const TransferKey&, const TransferKey&) = default;
  };
  /// Returns the sequence of `key`, or 0 if there are too many.
  uint32_t transfer_sequence(const TransferKey& key) {
    std::lock_guard lock(mutex_);
    return transfer_sequence_locked(key);
  }

  /// Returns the memory that the ranks share, or null if there is none. Waits until the ranks have
  /// agreed. Returns an error at `deadline`, or if the group fails, is aborted or closed by a rank.
  base::Result<std::shared_ptr<SharedSpace>> shared_space(base::TimePoint deadline);
  /// Records that this rank and group rank `rank` exchange messages. Returns true if they already
  /// had.
  bool meet(int rank) { return has_met_[static_cast<size_t>(rank)].exchange(true); }
  /// Tells group rank `to` to look at the marks. Ignores a lost rank.
  void send_look(int to) { send_control(to, kLook, 0); }
  /// Tells all ranks to look at the marks, on a thread of the executor. Does nothing after close(),
  /// because an operation may outlive the executor.
  void look_later() {
    std::lock_guard lock(looks_mutex_);
    if (!are_looks_over_) post_control(others(), kLook, 0);
  }
  /// Tells the other ranks, or the peer of a transfer, why operation `number` has failed here.
  void relay_locked(uint64_t number, const base::Error& error) {
    if (failure_) return;  // the other ranks learn that by themselves
    post_sends([number, error](Core& self) {
      self.send_refusals(number, 1, error, !is_transfer(number));
    });
  }
  /// Sends the header of a shared operation to group rank `from`, which has called another one, and
  /// `error` to the others.
  void answer_locked(uint64_t number, const OpSpec& spec, int from, const base::Error& error);
  /// Holds the tensor of a failed operation, to which other ranks may still write until they have
  /// left its slot.
  void keep_locked(size_t index, uint64_t mark, at::Tensor tensor) {
    kept_.push_back({index, mark, std::move(tensor)});
  }
  /// Releases the tensors of operations in slot `index` up to `mark`.
  void release_kept(size_t index, uint64_t mark) {
    std::vector<Kept> released;  // destroyed without the mutex
    std::lock_guard lock(mutex_);
    const auto last = std::partition(kept_.begin(), kept_.end(), [&](const Kept& kept) {
      return kept.index != index || kept.mark > mark;
    });
    std::move(last, kept_.end(), std::back_inserter(released));
    kept_.erase(last, kept_.end());
  }
  /// Looks at the marks for all pending operations.
  void on_look();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  int world_rank(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  base::Executor& executor() { return executor_; }
  /// Returns the number of the next operation of sequence 0.
  uint64_t next_number() const {
    std::lock_guard lock(mutex_);
    const auto it = next_.find(0);
    return it == next_.end() ? 0 : it->second;
  }
  std::optional<base::Error> failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  const std::shared_ptr<base::Tracer>& tracer() const { return tracer_; }

  /// Returns a buffer of `size` bytes. Throws `resources` if there is no memory.
  base::BufferPtr allocate(size_t size) {
    base::BufferPtr buffer = pool_.allocate(size);
    if (!buffer) {
      throw base::Exception(base::ErrorKind::kResources,
                            "no memory for a collective of " + std::to_string(size) + " bytes");
    }
    return buffer;
  }

  /// Sends to group rank `to`. The caller is counted in `active_` and does not hold mutex_.
  void send(int to, uint64_t number, int step, std::span<const std::span<const uint8_t>> pieces,
            std::shared_ptr<const void> keep_alive,
            std::shared_ptr<const net::Fd> descriptor = {}) {
    meet(to);
    channel_.send(world_rank(to), wire_tag(number, step), pieces, std::move(keep_alive),
                  std::move(descriptor));
  }
  void send(int to, uint64_t number, int step, const base::BufferPtr& buffer) {
    const std::span<const uint8_t> piece(buffer->data, buffer->size);
    send(to, number, step, std::span(&piece, 1), buffer);
  }
  /// Calls `send_to` for each other rank. Begins with the next rank, to spread the load. If a send
  /// fails, still calls `send_to` for the other ranks, then throws the first error.
  void send_each(const std::function<void(int to)>& send_to);
  /// Sends to all other ranks but `except`, or to the peer of a transfer.
  void send_to_all(uint64_t number, int step, const base::BufferPtr& buffer, int except = -1) {
    if (is_transfer(number)) return send(transfer_of(number).peer, number, step, buffer);
    send_each([&](int to) {
      if (to != except) send(to, number, step, buffer);
    });
  }

 private:
  friend class Operation;

  /// The state of a peer, guarded by `mutex_`. See Note [Window of a group].
  struct Peer {
    std::map<uint64_t, uint64_t> unanswered;  // operation number -> bytes
    uint64_t unanswered_bytes = 0;
    std::array<uint64_t, 2> early_bytes{};  // of the peer's collectives and transfers in `early_`
    bool closed = false;
    bool has_answered = false;  // the offer of shared memory
  };

  uint32_t transfer_sequence_locked(const TransferKey& key);
  TransferKey transfer_of(uint64_t number) const {
    std::lock_guard lock(mutex_);
    return transfers_[sequence_of(number) - kTransfers];
  }
  rpc::ChannelTag wire_tag(uint64_t number, int step) const;
  /// Replaces number and step by those of this rank. Returns false if there are too many sequences.
  bool to_own_number_locked(int from, rpc::ChannelTag& tag);
  void on_message(rpc::ChannelMessage message);
  void on_answer_locked(Peer& peer, uint64_t number);
  void on_closed_locked(int from);
  base::Error closed_error(int from, const Operation& operation) const;
  bool await_room(Operation& operation);
  void send_refusals(uint64_t first, int count, const base::Error& error, bool is_relayed = false,
                     int except = -1);
  /// Runs `sends` on a thread of the executor, unless the group has failed by then.
  void post_sends(std::function<void(Core&)> sends);
  /// Decrements `active_`, and wakes close() if it is 0.
  void end_active() {
    std::lock_guard lock(mutex_);
    if (--active_ == 0) idle_.notify_all();
  }
  /// Send a message without data; post_control() on a thread of the executor. Ignore lost ranks.
  void send_control(int to, uint64_t number, int step,
                    std::shared_ptr<const net::Fd> descriptor = {});
  void post_control(std::vector<int> to, uint64_t number, int step) {
    post_sends([to = std::move(to), number, step](Core& self) {
      for (const int rank : to) self.send_control(rank, number, step);
      if (number == kLook) self.on_look();
    });
  }
  void set_space_locked(base::Result<std::shared_ptr<net::SharedMemory>> memory) {
    if (memory.ok()) space_ = std::make_shared<SharedSpace>(memory.value(), rank_, size());
  }
  /// Offers the memory to the other ranks, on rank 0, or tells them that there is none.
  void offer_sharing();
  /// Handles a step of the agreement. Returns the error of a wrong message.
  std::optional<base::Error> on_sharing_locked(int from, const rpc::ChannelMessage& message);
  /// Ends the agreement on this rank. Rank 0 tells the others.
  void decide_sharing_locked(bool shares);
  std::vector<int> others() const {
    std::vector<int> ranks;
    for (int other = 0; other < size(); ++other) {
      if (other != rank_) ranks.push_back(other);
    }
    return ranks;
  }
  /// Returns the ranks that the agreement on shared memory waits for.
  std::vector<int> awaited_for_sharing_locked() const;
  uint64_t window() const { return kWindow / static_cast<uint64_t>(std::max(size() - 1, 1)); }
  void on_peer_lost(int world_rank, const base::Error& error);
  std::vector<rpc::Wait> waits() {
    std::lock_guard lock(mutex_);
    std::vector<rpc::Wait> all;
    for (const auto& [number, operation] : pending_) all.push_back(operation->wait_locked());
    for (const base::TimePoint since : sharing_waits_) {
      all.push_back({"the first collective of the group: nothing yet from rank " +
                         c10::Join(", ", awaited_for_sharing_locked()),
                     since});
    }
    return all;
  }
  void post(std::shared_ptr<Operation> operation) {
    executor_.post([operation = std::move(operation)] { operation->run_ready(); });
  }
  int group_rank(int world_rank) const {
    const auto it = std::ranges::find(ranks_, world_rank);
    return it == ranks_.end() ? -1 : static_cast<int>(it - ranks_.begin());
  }
  /// Returns the number of the next operation of a sequence; the caller increments it.
  uint64_t& next_locked(uint32_t sequence) {
    return next_.try_emplace(sequence, first_number(sequence)).first->second;
  }
  bool is_early_locked(uint64_t number) const {
    const auto it = next_.find(sequence_of(number));
    return it == next_.end() || number >= it->second;
  }
  /// Removes and returns the messages that arrived before this rank began operation `number`.
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
  std::map<TransferKey, uint32_t> transfer_sequences_;
  std::vector<TransferKey> transfers_;           // by sequence - kTransfers
  std::unordered_map<uint32_t, uint64_t> next_;  // next operation number, by sequence
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> pending_;
  std::map<uint64_t, std::vector<rpc::ChannelMessage>> early_;
  std::vector<Peer> peers_;                 // by group rank
  std::vector<std::atomic<bool>> has_met_;  // by group rank: has exchanged messages with this rank
  std::condition_variable room_;        // notified if a window may have room or an operation fails
  std::optional<base::Error> failure_;  // permanent failure of the group
  bool closed_ = false;
  enum class Sharing : uint8_t { kUndecided, kNo, kYes };
  Sharing sharing_;
  std::condition_variable sharing_decided_;
  std::shared_ptr<SharedSpace> space_;          // set by the offer, and used if kYes
  bool is_sharing_declined_ = false;            // on rank 0
  std::vector<base::TimePoint> sharing_waits_;  // begin times of waits in shared_space()
  std::optional<base::Error> aborted_;          // error of the last abort()
  uint64_t aborts_ = 0;
  struct Kept {
    size_t index;
    uint64_t mark;
    at::Tensor tensor;
  };
  std::vector<Kept> kept_;
  int active_ = 0;  // operations in Starting or Running, and other users of the channel
  std::condition_variable idle_;

  std::mutex looks_mutex_;  // may be locked while mutex_ is
  bool are_looks_over_ = false;
};

}  // namespace distrain::collective
