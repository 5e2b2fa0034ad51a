#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "distrain/rpc/rref.h"

namespace distrain::rpc {

// Note [RRef protocol]
//
// The owner of a value keeps it while any fork of its RRef lives. A fork is one rank's hold on the
// value, named by (rank that made the name, number); a rank may have several forks of one RRef.
// Only small messages between the same two ranks keep their order, and each may come twice. A
// message with large tensors may be overtaken by any but a Delete: Note [Bulk connections] in net/.
//
//   create   U calls remote() on O. The call contains the RRef's id and U's fork. U keeps its fork
//            at least until the call is answered, and O records the fork before it answers.
//   share    U sends the RRef to V, and names a new fork F for V.
//            - If U is the owner, it records F before it sends. V has F when the message arrives.
//            - If V is the owner, it takes a local hold when it reads the message. Until then U
//              keeps its own fork: for an argument until the call is answered, for a result until
//              V's Accept(F).
//            - Otherwise V sends Fork(id, F, parent U) to the owner O when it reads the message,
//              and O sends Accept(F) to U. Until then U keeps its own fork, so O always has one.
//   delete   When the last copy of F's RRef on its rank is destroyed, the rank sends Delete(id, F)
//            to O. It follows the rank's own Fork(id, F) on the same connection.
//
// O frees the value when it has neither forks nor local holds. A Fork or a fetch may reach O before
// the call that creates the value; whichever comes first creates the entry. So that messages are
// idempotent, O remembers the last few thousand deleted forks: a Fork after its Delete has no
// effect. O also remembers freed values: a call whose caller has given up may contain an RRef to
// one, which must fail instead of waiting. If a rank is lost, its forks are dropped, and the values
// that its calls would have created fail. If a new process replaces it, late messages of the lost
// process, and references to its values, are recognized: Note [Incarnations].
//
// All RRefs of a message are received with it. Those that are not decoded are released with it. If
// a message is not sent after all, its forks are retracted.

/// The last few thousand numbers that were inserted; forgets older ones.
class RecentSet {
 public:
  bool contains(uint64_t number) const { return numbers_.contains(number); }
  void insert(uint64_t number) {
    if (!numbers_.insert(number).second) return;
    order_.push(number);
    if (order_.size() <= kRemembered) return;
    numbers_.erase(order_.front());
    order_.pop();
  }

 private:
  static constexpr size_t kRemembered = 8192;
  std::unordered_set<uint64_t> numbers_;
  std::queue<uint64_t> order_;  // order of insertion
};

/// All RRefs that an agent owns or holds. Thread-safe.
class RRefContext : public std::enable_shared_from_this<RRefContext> {
 public:
  /// Sends a control message with a kind and three numbers: see on_control().
  using Send = std::function<void(int to, wire::FrameKind kind, uint64_t id, uint64_t fork,
                                  uint64_t parent)>;

  RRefContext(Agent& agent, int rank, Send send, base::Executor& executor)
      : agent_(&agent), rank_(rank), send_(std::move(send)), executor_(executor) {}

  Agent& agent() const {
    if (closed_) {
      throw base::Exception(base::ErrorKind::kCancelled, "the agent of this RRef has shut down");
    }
    return *agent_;
  }
  /// Sets the incarnation of this rank's process. Must be called before any id is created.
  void set_incarnation(uint32_t incarnation) { self_ = process_number(rank_, incarnation); }
  /// Records that `process` is the newest process of its rank.
  void know_process(ProcessNumber process) {
    std::lock_guard lock(mutex_);
    newest_[rank_of(process)] = process;
  }

  /// Creates a handle for a value of this rank that does not exist yet.
  std::shared_ptr<RRefHandle> new_local() {
    const uint64_t id = next_id();
    std::lock_guard lock(mutex_);
    owned_[id].made = true;
    return owner_handle(id, value_locked(id));
  }
  /// Creates a handle for a value that a remote() call to `owner` will create.
  std::shared_ptr<RRefHandle> new_remote(int owner) {
    if (owner == rank_) return new_local();
    const auto process = [&] {
      std::lock_guard lock(mutex_);
      return newest_locked(owner);
    };
    const uint64_t id = next_id();
    return user_handle(id, next_id(), process());
  }
  /// Returns the value `id`, which a remote() call of `caller` creates here and holds by `fork`.
  std::shared_ptr<OwnedValue> target(uint64_t id, uint64_t fork, int caller);

  void encode(Encoder& encoder, const std::shared_ptr<RRefHandle>& handle);
  /// Undoes encode() for the RRefs of a message that was not sent.
  void retract(const std::vector<RRefTicket>& tickets);
  /// Creates an RRefHandle in `message` for each RRef that it contains. Throws `protocol` if an
  /// RRef is invalid: for example, if it names a rank that does not exist.
  void receive(InMessage& message) {
    for (const RRefTicket& ticket : message.tickets) message.rrefs.push_back(receive(ticket));
  }
  /// Handles Fork(id, fork, parent), Accept(-, fork, -) or Delete(id, fork, -) of rank `from`.
  void on_control(wire::FrameKind kind, uint64_t id, uint64_t fork, int from, int parent);
  void on_peer_lost(ProcessNumber process, const base::Error& error);
  /// Fails all values that do not exist yet, because this agent ends.
  void fail_unset(const base::Error& error) {
    {
      std::lock_guard lock(mutex_);
      ended_ = error;
    }
    fail_unset(error, [](uint64_t) { return true; });
  }
  /// Detaches this object from the ending agent. Then nothing more is sent, and agent() throws.
  void close();
  /// Returns the counts of RRefs that Agent::info() lists.
  std::map<std::string, uint64_t> info() const {
    std::lock_guard lock(mutex_);
    const auto shared = std::ranges::count_if(
        owned_, [](const auto& record) { return !record.second.forks.empty(); });
    return {{"rrefs.owned", owned_.size()},
            {"rrefs.shared", static_cast<uint64_t>(shared)},
            {"rrefs.used", user_handles_},
            {"rrefs.pending", pending_children_.size()}};
  }
  /// Returns the number of owned values, held forks and forks that wait for an Accept.
  size_t live() const {
    std::lock_guard lock(mutex_);
    return owned_.size() + pending_children_.size() + user_handles_;
  }

 private:
  friend class RRefHandle;
  struct Record {
    std::weak_ptr<OwnedValue> value;
    std::shared_ptr<OwnedValue> kept;         // set while there are forks
    std::unordered_map<uint64_t, int> forks;  // fork → rank that has it
    bool made = false;                        // the call that creates the value has arrived
  };
  /// How the receiver holds the value. The numbers are part of the wire format.
  enum class Mode : uint8_t { kLocalHold = 1, kLocalHoldAccept, kConfirmed, kUnconfirmed };

  uint64_t next_id() { return make_id(self_, ++counter_); }
  std::shared_ptr<RRefHandle> user_handle(uint64_t id, uint64_t fork, ProcessNumber owner) {
    ++user_handles_;
    return std::make_shared<RRefHandle>(shared_from_this(), id, fork, owner, nullptr);
  }
  ProcessNumber newest_locked(int rank) const {
    const auto it = newest_.find(rank);
    return it == newest_.end() ? process_number(rank, 0) : it->second;
  }
  std::shared_ptr<OwnedValue> value_locked(uint64_t id);
  bool is_freed_locked(uint64_t id) const {
    const auto it = owned_.find(id);
    if (it == owned_.end()) return freed_.contains(id);
    // The entry of a destroyed value stays in `owned_` while the value's deleter waits for this
    // lock. So an expired value counts as freed here.
    return it->second.value.expired() && (it->second.made || freed_.contains(id));
  }
  std::shared_ptr<RRefHandle> owner_handle(uint64_t id, std::shared_ptr<OwnedValue> value) {
    return std::make_shared<RRefHandle>(shared_from_this(), id, 0, self_, std::move(value));
  }
  std::shared_ptr<RRefHandle> received_by_owner(const RRefTicket& ticket);
  std::shared_ptr<RRefHandle> receive(const RRefTicket& ticket);
  void fail_unset(const base::Error& error, const std::function<bool(uint64_t id)>& which);
  void add_fork(uint64_t id, uint64_t fork, int holder) {
    std::lock_guard lock(mutex_);
    if (deleted_.contains(fork) || is_freed_locked(id)) return;
    if (lost_.contains(newest_locked(holder))) return;
    std::shared_ptr<OwnedValue> value = value_locked(id);
    Record& record = owned_[id];
    record.forks[fork] = holder;
    record.kept = std::move(value);
  }
  void drop_forks(uint64_t id, const std::function<bool(uint64_t fork, int holder)>& which);
  /// Removes the entry of a value that has been destroyed.
  void sweep(uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto it = owned_.find(id);
    if (it == owned_.end() || !it->second.forks.empty() || !it->second.value.expired()) return;
    if (it->second.made) freed_.insert(id);
    if (!it->second.made) --unmade_;
    owned_.erase(it);
  }
  void send(int to, wire::FrameKind kind, uint64_t id, uint64_t fork, uint64_t parent) {
    if (to == rank_) {
      if (!closed_) on_control(kind, id, fork, rank_, static_cast<int>(parent));
      return;
    }
    // The lock lets close() wait for this send, because `send_` is invalid after close().
    std::shared_lock lock(closing_);
    if (!closed_) send_(to, kind, id, fork, parent);
  }

  Agent* const agent_;
  const int rank_;
  std::atomic<ProcessNumber> self_{process_number(rank_, 0)};
  const Send send_;
  base::Executor& executor_;
  const std::shared_ptr<base::Executor> kept_executor_ = executor_.weak_from_this().lock();
  mutable std::shared_mutex closing_;  // locked shared by threads that send
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> counter_{0};
  std::atomic<size_t> user_handles_{0};

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Record> owned_;
  size_t unmade_ = 0;  // number of entries of owned_ without `made`
  // Forks sent to other ranks, until their Accept arrives: the handle kept alive, and the receiver.
  std::unordered_map<uint64_t, std::pair<std::shared_ptr<RRefHandle>, int>> pending_children_;
  std::map<int, ProcessNumber> newest_;        // by rank; if missing: its first process
  std::map<ProcessNumber, base::Error> lost_;  // all processes that were lost
  std::optional<base::Error> ended_;           // set when remote() calls no longer run
  RecentSet deleted_;                          // deleted forks
  RecentSet freed_;                            // ids of freed values
};

}  // namespace distrain::rpc
