#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/base/result.h"
#include "distrain/rpc/incarnation.h"

namespace distrain::rpc {

// Note [Credit]
//
// A call needs credit for its bytes before its first byte is sent, and its caller waits for that
// credit. Each rank grants credit for calls to itself from one `Budget`. A caller keeps what one
// rank granted to it in a `Window`. Neither does I/O, so both can be simulated.
//
// A rank *holds* the credit that it was granted and has not returned: unspent, on the way, queued
// at the receiver, or kept by a call that has begun. Of B bytes for N ranks, each rank may always
// hold a window of W = min(peer budget, B/2N). Beyond windows there is a pool of B - N*W.
//
// - Credit that calls return refills their rank's window in portions of W/8, because a word for
//   each small call would cost as much as the call.
// - When its first waiting call finds no room, a rank asks for a target: all that it wants to have
//   been granted since the beginning, so that words that cross do no harm. Small calls ask
//   together. A request stands until it is granted, in one grant. A rank that asks is hungry until
//   it says that nobody waits.
// - A request that fits in the rank's window is granted at once. The pool serves others in order of
//   tags (start-time fair queueing; Goyal, Vin and Cheng, 1996). A rank's tag counts the bytes
//   granted while it was hungry; when the rank becomes hungry, the tag is raised to that of the
//   last request served. Nobody overtakes the first request, so that large calls are served, too.
// - A request larger than the pool is granted when nobody else holds any of the pool. A rank holds
//   at most the peer budget, or one call while no other call of it is outstanding.
// - A rank returns what is unspent beyond its window when its first waiting call cannot use it.
//
// Bounded: windows take N*W and the pool's grants the rest, so ranks hold at most B together,
// unless one call is larger than the pool. The receiver checks a header against what its rank holds
// before it takes memory for the body.
//
// Nobody waits for ever: unspent credit beyond a window is returned, or is enough for the first
// waiting call, which is then sent. So all of the pool comes back as calls begin, and the first
// request is granted. Each grant raises its rank's tag, and no rank becomes hungry with a lower tag
// than the last one served, so that each request becomes the first after finitely many grants.
//
// Fair: tags of ranks that are always hungry differ by one request and one window at most, as long
// as the pool serves them. Windows bypass the order, but while all that is queued begins once, they
// give a rank W at most, and its equal part of windows and pool is no less than W.
//
// A call returns its credit when it begins, so that two ranks that flood each other from within
// their functions both go on: a function that waits makes room for a thread that begins the next
// call. Calls that have begun and are not answered have returned B bytes at most; those beyond that
// keep their credit until there is room among them, or until they are answered.
//
// Replies, one-way messages and words of control need no credit: who waits for a reply must get it.
// But a call begins only while less than W bytes of replies to its caller are unwritten, and stays
// in the queue until then. So a rank keeps at most N*W bytes of replies and one per running
// function.

/// What a call takes beside its bytes, so that there is an end to small ones, too.
inline constexpr uint64_t kCallCost = 1024;
/// What each rank holds of each other at first. A budget is at least twice this for each rank.
inline constexpr uint64_t kFirstCredit = uint64_t{16} << 10;

/// What this rank may send to one other. Thread-safe.
class Window {
 public:
  /// Bytes since the beginning: spent or returned; wanted (0: nobody waits); returned unused.
  struct Request {
    uint64_t spent = 0;
    uint64_t target = 0;
    uint64_t returned = 0;
  };
  /// Tells the other rank. May call this object.
  using Ask = std::function<void(const Request&)>;

  struct Waiter {
    uint64_t bytes = 0;
    base::TimePoint since;
    std::condition_variable turn;
  };

  explicit Window(Ask ask) : ask_(std::move(ask)) {}

  /// Takes `bytes` if they are there and nobody waits.
  bool try_take(uint64_t bytes);
  /// Takes `bytes`, waiting until `deadline`. Fails with `overloaded` or the error of fail();
  /// throws `overloaded` when no thread is left that could wait.
  base::Status take(uint64_t bytes, base::TimePoint deadline);
  /// Returns `bytes` that were taken for a call that is not sent.
  void give_back(uint64_t bytes);
  /// The other rank grants `bytes`. Its windows are of `size`.
  void grant(uint64_t bytes, uint64_t size);
  /// From now on nobody gets any, nor waits.
  void fail(const base::Error& error);

  /// Since when somebody has waited.
  std::optional<base::TimePoint> waiting_since() const;

  // The steps of take(). A waiter stays where it is until it leaves.
  void line_up(Waiter& waiter);
  /// Whether it was the first, and has been served.
  bool try_serve(const Waiter& waiter);
  void leave(const Waiter& waiter);

 private:
  bool try_serve_locked(const Waiter& waiter);
  bool take_at_once(uint64_t bytes);
  std::optional<Request> next_request_locked();
  void say();

  const Ask ask_;
  std::atomic<uint64_t> available_{kFirstCredit};
  std::atomic<bool> is_contended_{false};  // somebody waits, or it has failed: use the lock
  mutable std::mutex mutex_;
  std::deque<Waiter*> waiters_;      // the first is the next
  uint64_t granted_ = kFirstCredit;  // since the beginning
  uint64_t returned_ = 0;            // without use, since the beginning
  uint64_t size_ = kFirstCredit;
  Request said_;
  bool is_saying_ = false;  // one thread tells the other rank
  std::optional<base::Error> failed_;
};

/// What all ranks may have sent to this one, and what its calls hold. Thread-safe.
class Budget {
 public:
  struct Grant {
    ProcessNumber to = 0;
    uint64_t bytes = 0;
  };
  /// To be told to those ranks. Mostly empty.
  using Grants = std::vector<Grant>;

  /// A call that has begun. Stays where it is until its end.
  struct Work {
    ProcessNumber from = 0;
    uint64_t credit = 0;

   private:
    friend class Budget;
    bool is_kept = false;  // it holds its credit
    std::list<Work*>::iterator at;
  };

  Budget(int ranks, uint64_t total, uint64_t per_peer);

  uint64_t window() const { return window_; }
  /// What all ranks hold.
  uint64_t held() const;

  /// The rank is connected: it learns its window.
  Grants open(ProcessNumber process);
  /// A call of `bytes` comes. False if its rank does not hold so much.
  bool arrive(int rank, uint64_t bytes);
  /// Throws `protocol` for a request that no Window makes.
  Grants ask(int rank, const Window::Request& request);
  /// What has come will not begin.
  Grants drop(ProcessNumber from, uint64_t bytes);
  Grants begin(Work& work, ProcessNumber from, uint64_t credit);
  Grants end(Work& work);
  /// The rank is lost: nothing is its own any more.
  Grants lose(int rank);
  /// A new process has its place.
  void renew(ProcessNumber process);

 private:
  struct Peer {
    uint32_t incarnation = 0;
    bool is_here = true;
    bool is_open = false;
    bool is_hungry = false;
    bool is_in_order = false;
    uint64_t tag = 0;
    uint64_t used = 0;  // by calls that have come
    // Since the beginning.
    uint64_t granted = kFirstCredit;
    uint64_t returned = 0;
    uint64_t unused = 0;  // returned without use
    uint64_t spent = 0;
    uint64_t target = 0;

    uint64_t held() const { return granted - returned; }
  };

  Peer& at(int rank) { return peers_[static_cast<size_t>(rank)]; }
  uint64_t beyond_window(const Peer& peer) const {
    return peer.held() > window_ ? peer.held() - window_ : 0;
  }
  void grant_locked(int rank, uint64_t bytes, Grants& grants);
  void return_locked(Peer& peer, uint64_t bytes);
  void take_back_locked(ProcessNumber from, uint64_t bytes, Grants& grants);
  void settle_locked(int rank, Grants& grants);
  void leave_order_locked(int rank);
  void serve_locked(Grants& grants);

  const uint64_t total_;
  const uint64_t window_;
  const uint64_t pool_;
  const uint64_t most_;  // that one rank holds
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  uint64_t held_;
  uint64_t pooled_ = 0;                       // held beyond windows
  uint64_t now_ = 0;                          // the tag of the last request that the pool served
  std::set<std::pair<uint64_t, int>> order_;  // of ranks that wait for the pool, by tag
  uint64_t begun_ = 0;                        // returned by calls that are not answered
  std::list<Work*> kept_;
};

/// The replies that the kernel has not taken yet, by the rank that they go to. Thread-safe.
class UnwrittenReplies : public std::enable_shared_from_this<UnwrittenReplies> {
 public:
  /// Less than `limit` bytes go to that rank by now, and were not before. Called on any thread.
  using OnRoom = std::function<void(int rank)>;

  UnwrittenReplies(int ranks, uint64_t limit, OnRoom on_room)
      : limit_(limit), on_room_(std::move(on_room)), bytes_(static_cast<size_t>(ranks)) {}

  /// Counts `bytes` to `rank` until the last copy of the result ends. That keeps `also` alive.
  std::shared_ptr<const void> count(int rank, uint64_t bytes, std::shared_ptr<const void> also);
  bool is_full(int rank) const { return bytes_[static_cast<size_t>(rank)] >= limit_; }

 private:
  const uint64_t limit_;
  const OnRoom on_room_;
  std::vector<std::atomic<uint64_t>> bytes_;
};

}  // namespace distrain::rpc
