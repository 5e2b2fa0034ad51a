#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "distrain/base/executor.h"
#include "distrain/rpc/incarnation.h"
#include "distrain/rpc/rref.h"
#include "distrain/wire/frame.h"

namespace distrain::rpc {

// Note [RRef protocol]
//
// The owner of a value keeps it while any fork of its RRef lives. A fork is one rank's hold on it,
// named by (rank that made the name, number); a rank may have several forks of one RRef. Every
// message below goes over the connection between the two ranks named, which keeps its order; no
// order is assumed between different connections, and each message may come twice.
//
//  create   U calls remote() on O. The call carries the RRef's id and U's fork. U keeps its fork at
//           least until the call is answered, and O notes the fork before it answers.
//  share    U sends the RRef to V, naming a new fork F for V.
//           - U is the owner: it notes F before it sends. V has F from the moment of arrival.
//           - V is the owner: V takes a local hold when it reads the message. Until then U keeps
//             its own fork: for an argument until the call is answered; for a result until V's
//             Accept(F).
//           - else V tells the owner Fork(id, F, parent U) when it reads the message, and O tells U
//             Accept(F). Until then U keeps its own fork, so O always has one.
//  delete   The last copy of F's RRef on its rank dies: Delete(id, F) to the owner. It cannot
//           overtake V's own Fork(id, F), which went before on the same connection.
//
// O frees the value when it has neither forks nor local holds. A Fork or a fetch may reach O before
// the call that makes the value: the entry is then made by whichever comes first. To be idempotent
// O remembers the last few thousand deleted forks: Fork after Delete of the same name does nothing.
// It remembers freed values too: a call whose caller gave up on it (its deadline passed) may bring
// an RRef of one, which must fail and not wait for a value to come. A rank that is lost takes its
// forks with it, and the values that it was to make. Where a new process takes its place, what is
// late of the one before is known by its ids, and references to its values by the process that
// they name as their owner: Note [Incarnations].
//
// All RRefs of a message are received with it, whether or not anybody decodes them (the function
// may not exist, the caller may have given up): those that are left over end with the message. A
// message that is not sent after all takes its forks back.

/// The last few thousand numbers that were put in.
class RecentSet {
 public:
  bool contains(uint64_t number) const { return numbers_.contains(number); }
  void insert(uint64_t number) {
    if (!numbers_.insert(number).second) return;
    if (ring_.size() < kRemembered) {
      ring_.push_back(number);
    } else {
      numbers_.erase(ring_[next_]);
      ring_[next_] = number;
      next_ = (next_ + 1) % kRemembered;
    }
  }

 private:
  static constexpr size_t kRemembered = 8192;
  std::unordered_set<uint64_t> numbers_;
  std::vector<uint64_t> ring_;  // in the order they were put in
  size_t next_ = 0;
};

/// All RRefs that one agent owns or holds. Thread-safe.
class RRefContext : public std::enable_shared_from_this<RRefContext> {
 public:
  /// Sends a control message: kind, and its three numbers (see on_control).
  using Send = std::function<void(int to, wire::FrameKind kind, uint64_t id, uint64_t fork,
                                  uint64_t parent)>;

  RRefContext(Agent& agent, int rank, Send send, base::Executor& executor);

  Agent& agent() const;

  /// Of this rank's process; before it has made any id.
  void set_incarnation(uint32_t incarnation) { self_ = process_number(rank_, incarnation); }
  /// The newest process of another rank.
  void know_process(ProcessNumber process);

  std::shared_ptr<RRefHandle> new_local();            ///< owned here, value to come
  std::shared_ptr<RRefHandle> new_remote(int owner);  ///< for a remote() call to `owner`
  /// On the owner: the value that a remote() call of `caller` with this id and fork makes.
  std::shared_ptr<OwnedValue> target(uint64_t id, uint64_t fork, int caller);

  void encode(Encoder& encoder, const std::shared_ptr<RRefHandle>& handle);
  /// Undoes what encode() noted for a message that was not sent.
  void retract(const std::vector<RRefTicket>& tickets);
  /// Makes handles of the message's tickets; throws `protocol` for what no rank of ours would send.
  void receive(InMessage& message);

  /// kRRefFork(id, fork, parent), kRRefAccept(-, fork, -), kRRefDelete(id, fork, -). On any thread.
  void on_control(wire::FrameKind kind, uint64_t id, uint64_t fork, int from, int parent);
  void on_peer_lost(ProcessNumber process, const base::Error& error);
  /// Fails the values that have not come yet: nobody waits for one any more.
  void fail_unset(const base::Error& error);
  /// From here on nothing is sent and agent() throws.
  void close();

  /// Values owned, forks held and forks that wait for an Accept.
  size_t live() const;

 private:
  friend class RRefHandle;
  struct Record {
    std::weak_ptr<OwnedValue> value;
    std::shared_ptr<OwnedValue> kept;         // while there are forks
    std::unordered_map<uint64_t, int> forks;  // fork → rank that has it
    bool made = false;  // what makes the value has come, not only references to it
  };
  enum class Mode : uint8_t {
    kLocalHold = 1,
    kLocalHoldAccept = 2,
    kConfirmed = 3,
    kUnconfirmed = 4
  };

  uint64_t next_id() { return make_id(self_, ++counter_); }
  std::shared_ptr<RRefHandle> user_handle(uint64_t id, uint64_t fork, ProcessNumber owner);
  ProcessNumber newest_locked(int rank) const;
  std::shared_ptr<OwnedValue> value_locked(uint64_t id);
  bool is_freed_locked(uint64_t id) const;
  std::shared_ptr<RRefHandle> owner_handle(uint64_t id, std::shared_ptr<OwnedValue> value);
  std::shared_ptr<RRefHandle> received_by_owner(const RRefTicket& ticket);
  std::shared_ptr<RRefHandle> receive(const RRefTicket& ticket);
  void fail_unset(const base::Error& error, const std::function<bool(uint64_t id)>& which);
  void add_fork(uint64_t id, uint64_t fork, int holder);
  void drop_forks(uint64_t id, const std::function<bool(uint64_t fork, int holder)>& which);
  void sweep(uint64_t id);
  void send(int to, wire::FrameKind kind, uint64_t id, uint64_t fork, uint64_t parent);

  Agent* const agent_;
  const int rank_;
  std::atomic<ProcessNumber> self_{process_number(rank_, 0)};
  const Send send_;
  base::Executor& executor_;
  const std::shared_ptr<base::Executor> kept_executor_ = executor_.weak_from_this().lock();
  mutable std::shared_mutex closing_;  // shared: a message is being sent
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> counter_{0};
  std::atomic<size_t> user_handles_{0};

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Record> owned_;
  size_t unmade_ = 0;  // of owned_: referred to, but not made yet
  // Forks named for others that wait for an Accept: what they keep alive, and who was to get them.
  std::unordered_map<uint64_t, std::pair<std::shared_ptr<RRefHandle>, int>> pending_children_;
  std::map<int, ProcessNumber> newest_;        // by rank; those that are not here: the first
  std::map<ProcessNumber, base::Error> lost_;  // all of them
  std::optional<base::Error> ended_;           // why no value is made any more
  RecentSet deleted_;                          // forks
  RecentSet freed_;                            // values
};

}  // namespace distrain::rpc
