#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <optional>

#include "distrain/base/clock.h"
#include "distrain/base/result.h"
#include "distrain/rpc/channel.h"
#include "distrain/rpc/incarnation.h"

namespace distrain::rpc {

// Note [Credit]
//
// What waits on a rank to be run is bounded, in bytes: a caller needs credit for a call, and waits
// until it has it; if the call's time is over before, the call is `overloaded`. The rank that is
// called gives it, so much to each other rank, and gives back what a call took as soon as that
// begins, or, when those that have begun and are not answered hold as much as may be held, as soon
// as there is room for it among them. It does so in portions, as a word for each small call
// would cost as much as the call; who waits says for how much, and is then told of every byte,
// until it says that it waits no more. A call that needs more than all its caller can have waits
// until none of its calls waits there any more, and is then lent the rest; all loans of a rank
// together are bounded, too, unless there is only one. A loan is paid back by the calls that it was
// for, or, if there are none any more, by whoever has it.
//
// Replies need no credit, and neither do one-way messages, words of control, and calls with tensors
// of devices, which are bounded by the pinned memory that they go through: who waits for a reply
// must get it, however much both have asked of each other. So two ranks that flood each other from
// within their functions both go on: a function that waits makes room for a thread that begins the
// next call.

/// What a call takes beside its bytes, so that there is an end to small ones, too.
inline constexpr uint64_t kCallCost = 1024;
/// What each rank may send to another before it is told how much it may.
inline constexpr uint64_t kFirstCredit = uint64_t{1} << 20;

/// What this rank may send to one other. Thread-safe.
class Credit {
 public:
  /// Tells the other rank that so many bytes are waited for, 0: none any more; and that so many
  /// others, which were lent, are not needed.
  using Ask = std::function<void(uint64_t bytes, uint64_t returned)>;

  explicit Credit(Ask ask) : ask_(std::move(ask)) {}

  /// Takes `bytes` if they are there, and nobody waits for any.
  bool try_take(uint64_t bytes);
  /// Takes `bytes`, waiting for them until `deadline`. `overloaded` or the reason of fail()
  /// otherwise; throws `overloaded` when no thread is left that could wait. The loop does not wait,
  /// it owes.
  base::Status take(uint64_t bytes, base::TimePoint deadline);
  /// The other rank gives it, or gives it back; so much of it is lent.
  void give(uint64_t bytes, uint64_t lent);
  /// From now on nobody gets any, nor waits for it.
  void fail(const base::Error& error);

  /// Since when somebody has waited.
  std::optional<base::TimePoint> waiting_since() const;

 private:
  struct Waiter {
    int64_t bytes = 0;
    base::TimePoint since;
    std::condition_variable turn;
  };
  base::Status wait(int64_t bytes, base::TimePoint deadline);
  base::Status wait_for_turn(Waiter& self, base::TimePoint deadline);
  bool take_at_once(int64_t bytes);
  void say_what_is_waited_for();

  uint64_t unneeded_loan_locked();

  const Ask ask_;
  std::atomic<int64_t> available_{static_cast<int64_t>(kFirstCredit)};
  std::atomic<bool> is_contended_{
      false};  // somebody waits, or nobody gets any: look under the lock
  mutable std::mutex mutex_;
  std::deque<Waiter*> waiters_;  // the first is the next
  uint64_t lent_ = 0;            // of what came, at most, while somebody waits
  std::optional<base::Error> failed_;
  bool is_saying_ = false;  // one thread tells the other rank
  uint64_t asked_ = 0;      // what that has been told
};

/// What is lent to all other ranks. Thread-safe.
class Loans {
 public:
  explicit Loans(uint64_t limit) : limit_(limit) {}
  bool lend(uint64_t bytes);
  void take_back(uint64_t bytes);

 private:
  const uint64_t limit_;
  std::mutex mutex_;
  uint64_t lent_ = 0;
};

/// What one other rank may send to this one. Thread-safe.
class Allowance {
 public:
  /// What is to be told to the other rank, at once: so many bytes more, so many of them lent.
  using Give = std::function<void(uint64_t bytes, uint64_t lent)>;

  Allowance(uint64_t window, Loans& loans, Give give)
      : window_(std::max(window, kFirstCredit)), loans_(loans), give_(std::move(give)) {}

  /// The connection stands: it is told what it may send. Once.
  void open();
  /// A call of it has come. False if it has sent far more than it may.
  bool on_arrived(uint64_t bytes);
  /// One has begun, or never will. True if that has brought back a loan, which others may wait for.
  bool on_begun(uint64_t bytes);
  /// It waits for `bytes`; 0: no more. It gives back a part of what was lent. True if others may
  /// wait for that.
  bool on_asked(uint64_t bytes, uint64_t returned);
  /// Others have given back what was lent to them. True if it has, too.
  bool try_again();
  /// That rank is lost: what was lent to it is there for others.
  void close();

 private:
  struct Owed {
    uint64_t bytes = 0;
    uint64_t lent = 0;    // of them
    uint64_t repaid = 0;  // of a loan, and not given
  };
  Owed owed_locked();
  uint64_t repay_locked(uint64_t bytes);

  const uint64_t window_;
  Loans& loans_;
  const Give give_;
  std::mutex mutex_;
  bool is_open_ = false;
  uint64_t waiting_ = 0;     // bytes of calls that have come and not begun
  uint64_t unreturned_ = 0;  // of calls that have begun since the last word
  uint64_t lent_ = 0;        // beyond the window
  uint64_t asked_ = 0;       // what is waited for
};

/// The calls that have begun on this rank and are not answered: their functions wait for others,
/// and hold their arguments meanwhile. Up to `limit` bytes of them have given their credit back.
/// Thread-safe.
class CallsInWork {
 public:
  /// One of them. Stays where it is until its end.
  struct Call {
    ProcessNumber from = 0;
    uint64_t credit = 0;

   private:
    friend class CallsInWork;
    bool was_kept = false;          // at its beginning
    bool is_kept = false;           // by mutex_: it has its credit still
    std::list<Call*>::iterator at;  // by mutex_: in kept_
  };
  /// What a call of `from` took goes back.
  using GiveBack = std::function<void(ProcessNumber from, uint64_t bytes)>;

  CallsInWork(uint64_t limit, GiveBack give_back)
      : limit_(limit), give_back_(std::move(give_back)) {}

  void begin(Call& call, ProcessNumber from, uint64_t credit);
  void end(Call& call);

 private:
  bool admit(uint64_t bytes);
  void admit_kept();

  const uint64_t limit_;
  const GiveBack give_back_;
  std::atomic<uint64_t> admitted_{0};  // bytes of those that have given their credit back
  std::atomic<bool> keeps_some_{false};
  std::mutex mutex_;
  std::list<Call*> kept_;
};

}  // namespace distrain::rpc
