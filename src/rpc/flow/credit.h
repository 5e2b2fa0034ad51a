#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/rpc/channel.h"

namespace distrain::rpc {

// Note [Credit]
//
// A call needs credit for its bytes before its first byte is sent, and its caller waits for the
// credit. Each rank grants credit for calls to itself from one `Budget`. A caller keeps the credit
// that one rank granted to it in a `Window`. Neither class does I/O, so tests can simulate both.
//
// A rank *holds* the credit that it was granted and has not returned: unspent, in transit, queued
// at the receiver, or kept by a call that has begun. Of B bytes for N ranks, each rank may always
// hold a window of W = min(peer budget, B/2N). The other B - N*W bytes are the pool.
//
//  - Credit returned by calls refills the window of their rank in portions of W/8, because a
//    message for each small call would cost as much as the call.
//  - When its first waiting call finds no credit, a rank sends a request with a target: all credit
//    that it wants to have been granted since the beginning, so crossing messages do no harm.
//    Small calls share a request, which stands until one grant satisfies it. A rank that sent a
//    request is hungry until it reports that no call waits.
//  - A request that fits in the rank's window is granted at once. The pool serves others in order
//    of tags (start-time fair queueing; Goyal, Vin and Cheng, 1996). A rank's tag counts the bytes
//    granted while it was hungry; when it becomes hungry, its tag is raised to that of the last
//    request served. No request overtakes the first, so large calls are served too.
//  - A request larger than the pool is granted when no other rank holds any of the pool. A rank
//    holds at most the peer budget, or one call while it has no other call outstanding.
//  - A rank returns unspent credit beyond its window when its first waiting call cannot use it.
//
// Bounded: windows take N*W and the pool's grants the rest, so ranks together hold at most B,
// unless one call is larger than the pool. The receiver compares a header with its sender's credit
// before it allocates memory for the body.
//
// Starvation-free: unspent credit beyond a window is returned, or sends the first waiting call. So
// the whole pool is returned as calls begin, and the first request is granted. A grant raises its
// rank's tag, and no rank becomes hungry with a tag below that of the last one served, so each
// request becomes the first after finitely many grants.
//
// Fair: while the pool serves them, the tags of ranks that are always hungry differ by at most one
// request and one window. Windows bypass the order; but while all queued calls begin once, windows
// give a rank at most W, and its equal share of windows and pool is no less than W.
//
// A call returns its credit when it begins. So two ranks that flood each other from inside their
// functions both make progress: when a function waits, another thread begins the next call. Calls
// that have begun without an answer have returned at most B bytes; others keep their credit until
// there is room, or until they are answered. Small calls with credit of their own have returned at
// most B bytes, too. With less, a small call could wait for unanswered ones, although by now there
// is other credit.
//
// A call larger than the pool waits for, and then takes, all credit of its rank. So that small
// calls need not wait for it, they have credit of their own, in a second `Budget` and `Window`. A
// small call uses that if it would have to wait for other credit, and waits there if need be.
//
// Replies, one-way messages and control messages need no credit, because a rank that waits for a
// reply must get it. But a call begins only while less than W bytes of replies to its caller are
// unwritten. A reply counts as 7/8 W at most, so that calls can begin beside one large reply. So a
// rank keeps for each other one at most W bytes of replies, or two larger ones, and one more reply
// for each running function.

/// Added to a call's bytes to get its cost. This limits the number of small calls.
inline constexpr uint64_t kCallCost = 1024;
/// Initial credit for calls to one rank. A budget for N ranks is at least 2 * N * kFirstCredit.
inline constexpr uint64_t kFirstCredit = uint64_t{16} << 10;
/// The most cost of a call that may use the credit for small calls.
inline constexpr uint64_t kLargestSmallCall = uint64_t{64} << 10;
/// The small calls of all ranks may take this part of AgentOptions::total_budget in addition, and
/// those of one rank at most `kSmallCallsWindow` bytes.
inline constexpr uint64_t kSmallCallsShare = 8;
inline constexpr uint64_t kSmallCallsWindow = uint64_t{1} << 20;

/// This rank's credit for calls to one other rank: see Note [Credit]. Thread-safe.
class Window {
 public:
  /// Totals in bytes: `spent` is credit that was used or returned, `returned` is credit that was
  /// returned unused, `target` is all credit that this rank wants to get (0: no call waits).
  struct Request {
    uint64_t spent = 0;
    uint64_t target = 0;
    uint64_t returned = 0;
  };
  /// Sends a request to the other rank. May call this Window again.
  using Ask = std::function<void(const Request&)>;

  struct Waiter {
    uint64_t bytes = 0;
    base::TimePoint since;
    std::condition_variable turn;
  };

  explicit Window(Ask ask) : ask_(std::move(ask)) {}
  /// Takes `bytes` and returns true, if they are available and no call waits; else returns false.
  bool try_take(uint64_t bytes) {
    std::lock_guard lock(mutex_);
    return !failed_ && waiters_.empty() && take_locked(bytes);
  }
  /// Takes `bytes`; waits for credit if there is not enough. Returns `overloaded` at `deadline`, or
  /// the error given to fail(). Throws `overloaded` if the thread pool would have no idle thread.
  base::Status take(uint64_t bytes, base::TimePoint deadline);
  /// Adds back credit that was taken for a call that was not sent after all.
  void give_back(uint64_t bytes) {
    if (bytes == 0) return;
    {
      std::lock_guard lock(mutex_);
      returned_ += bytes;
    }
    send_requests();
  }
  /// Adds the `bytes` that the other rank has granted. `size` is Budget::window() on that rank.
  void grant(uint64_t bytes, uint64_t size) {
    {
      std::lock_guard lock(mutex_);
      size_ = size;
      granted_ += bytes;
      available_ += bytes;
      if (!waiters_.empty()) waiters_.front()->turn.notify_one();
    }
    send_requests();
  }
  /// Makes all calls of take() fail with `error`, both those that wait and later ones.
  void fail(const base::Error& error) {
    std::lock_guard lock(mutex_);
    if (failed_) return;
    failed_ = error;
    for (Waiter* waiter : waiters_) waiter->turn.notify_one();
  }
  bool has_failed() const {
    std::lock_guard lock(mutex_);
    return failed_.has_value();
  }
  /// Returns the time when the first waiting call began to wait; nullopt if no call waits.
  std::optional<base::TimePoint> waiting_since() const {
    std::lock_guard lock(mutex_);
    if (waiters_.empty()) return std::nullopt;
    return waiters_.front()->since;
  }
  // The steps of take(). `waiter` must not move between enqueue() and dequeue().
  void enqueue(Waiter& waiter) {
    {
      std::lock_guard lock(mutex_);
      waiters_.push_back(&waiter);
    }
    send_requests();
  }
  /// If `waiter` is first in the queue and its credit is available, takes the credit; returns true.
  bool try_serve(const Waiter& waiter) {
    std::lock_guard lock(mutex_);
    return try_serve_locked(waiter);
  }
  void dequeue(const Waiter& waiter);

 private:
  bool try_serve_locked(const Waiter& waiter) {
    return waiters_.front() == &waiter && take_locked(waiter.bytes);
  }
  /// Takes all or nothing: taking a part for a moment could make another thread wait in vain.
  bool take_locked(uint64_t bytes) {
    if (available_ < bytes) return false;
    available_ -= bytes;
    return true;
  }
  std::optional<Request> next_request_locked();
  void send_requests();

  const Ask ask_;
  mutable std::mutex mutex_;
  uint64_t available_ = kFirstCredit;
  std::deque<Waiter*> waiters_;      // the first is served next
  uint64_t granted_ = kFirstCredit;  // total since the beginning
  uint64_t returned_ = 0;            // total that was returned unused
  uint64_t size_ = kFirstCredit;
  Request last_request_;
  bool is_sending_ = false;  // one thread at a time sends requests
  std::optional<base::Error> failed_;
};

/// Grants credit to all ranks for calls to this rank: see Note [Credit]. Thread-safe.
class Budget {
 public:
  struct Grant {
    ProcessNumber to = 0;
    uint64_t bytes = 0;
  };
  /// New grants, which the calling code must send to their ranks. Usually empty.
  using Grants = std::vector<Grant>;
  /// The credit of a call that has begun. Must not move before end().
  struct Work {
    ProcessNumber from = 0;
    uint64_t credit = 0;

   private:
    friend class Budget;
    bool is_kept = false;  // the call keeps its credit until it ends or there is room
    std::list<Work*>::iterator at;
  };

  /// Unanswered calls that have begun may return `most_begun` bytes, or `total` if that is more.
  Budget(int ranks, uint64_t total, uint64_t per_peer, uint64_t most_begun = 0);

  uint64_t window() const { return window_; }
  uint64_t held() const {
    std::lock_guard lock(mutex_);
    uint64_t held = 0;
    for (const Peer& peer : peers_) held += peer.held();
    return held;
  }
  /// Called when the rank is connected. Grants the rank its window.
  Grants open(ProcessNumber process);
  /// Called when a call of `bytes` arrives. Returns false if the calling rank holds less credit.
  bool arrive(int rank, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    Peer& peer = at(rank);
    if (!peer.is_here) return true;  // a lost rank's calls are not run
    if (bytes > peer.held() - peer.used) return false;
    peer.used += bytes;
    return true;
  }
  /// Handles a request. Throws `protocol` if no Window would send this request.
  Grants ask(int rank, const Window::Request& request);
  /// Takes back the credit of a call that was received but will not begin.
  Grants drop(ProcessNumber from, uint64_t bytes) {
    Grants grants;
    std::lock_guard lock(mutex_);
    reclaim_locked(from, bytes, grants);
    return grants;
  }
  Grants begin(Work& work, ProcessNumber from, uint64_t credit);
  Grants end(Work& work);
  /// Called when the rank is lost. Takes back the credit that it holds.
  Grants lose(int rank);
  /// Called when a new process replaces the process of a lost rank.
  void renew(ProcessNumber process) {
    std::lock_guard lock(mutex_);
    Peer& peer = at(rank_of(process));
    leave_order_locked(rank_of(process));
    return_locked(peer, peer.held());
    peer = Peer{.incarnation = incarnation_of(process), .tag = peer.tag};
  }

 private:
  struct Peer {
    uint32_t incarnation = 0;
    bool is_here = true;
    bool is_open = false;
    bool is_hungry = false;
    bool is_in_order = false;
    uint64_t tag = 0;
    uint64_t used = 0;  // credit of calls that have arrived
    // Totals in bytes since the start of the rank's process:
    uint64_t granted = kFirstCredit;
    uint64_t returned = 0;
    uint64_t unused = 0;  // total that was returned unused
    uint64_t spent = 0;
    uint64_t target = 0;

    uint64_t held() const { return granted - returned; }
  };

  Peer& at(int rank) { return peers_[static_cast<size_t>(rank)]; }
  uint64_t beyond_window(const Peer& peer) const {
    return peer.held() > window_ ? peer.held() - window_ : 0;
  }
  void grant_locked(int rank, uint64_t bytes, Grants& grants);
  void return_locked(Peer& peer, uint64_t bytes) {
    pooled_ -= beyond_window(peer);
    peer.returned += bytes;
    pooled_ += beyond_window(peer);
  }
  void reclaim_locked(ProcessNumber from, uint64_t bytes, Grants& grants);
  void update_locked(int rank, Grants& grants);
  void leave_order_locked(int rank) {
    Peer& peer = at(rank);
    if (std::exchange(peer.is_in_order, false)) order_.erase({peer.tag, rank});
  }
  void serve_pool_locked(Grants& grants);

  const uint64_t total_;
  const uint64_t window_;
  const uint64_t pool_;
  const uint64_t most_;        // maximum credit of one rank
  const uint64_t most_begun_;  // maximum of begun_, unless it is of a single call
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  uint64_t pooled_ = 0;                       // the credit that ranks hold beyond their windows
  uint64_t now_ = 0;                          // tag of the last request that the pool served
  std::set<std::pair<uint64_t, int>> order_;  // ranks that wait for the pool, by tag
  uint64_t begun_ = 0;                        // credit returned by unanswered calls
  std::list<Work*> kept_;
};

/// Counts, for each rank, the reply bytes that the kernel has not accepted yet. Thread-safe.
class UnwrittenReplies : public std::enable_shared_from_this<UnwrittenReplies> {
 public:
  /// Called on any thread when the unwritten bytes for `rank` have fallen below `limit`.
  using OnRoom = std::function<void(int rank)>;

  UnwrittenReplies(int ranks, uint64_t limit, OnRoom on_room)
      : limit_(limit), on_room_(std::move(on_room)), bytes_(static_cast<size_t>(ranks)) {}

  /// Counts `bytes` for `rank` until the last copy of the result, which owns `also`, is destroyed.
  std::shared_ptr<const void> count(int rank, uint64_t bytes, std::shared_ptr<const void> also);
  bool is_full(int rank) const { return bytes_[static_cast<size_t>(rank)] >= limit_; }

 private:
  const uint64_t limit_;
  const OnRoom on_room_;
  std::vector<std::atomic<uint64_t>> bytes_;
};

}  // namespace distrain::rpc
