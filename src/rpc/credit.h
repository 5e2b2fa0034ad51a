#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>

#include "distrain/base/clock.h"
#include "distrain/base/result.h"
#include "distrain/rpc/channel.h"

namespace distrain::rpc {

// Note [Credit]
//
// What waits on a rank to be run is bounded, in bytes: a caller needs credit for a call, and waits
// until it has it. The rank that is called gives it, so much to each other rank, and gives back
// what a call took as soon as that begins. It does so in portions, as a word for each small call
// would cost as much as the call; who waits says for how much, and is then told of every byte,
// until it says that it waits no more. A call that needs more than all its caller can have waits
// until none of its calls waits there any more, and is then lent the rest; all loans of a rank
// together are bounded, too, unless there is only one.
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
  /// `ask` tells the other rank that so many bytes are waited for; 0: none any more.
  explicit Credit(std::function<void(uint64_t bytes)> ask) : ask_(std::move(ask)) {}

  /// Takes `bytes`, waiting for them until `deadline`. `deadline` or the reason of fail()
  /// otherwise; throws `overloaded` when no thread is left that could wait. The loop does not wait,
  /// it owes.
  base::Status take(uint64_t bytes, base::TimePoint deadline);
  /// The other rank gives it, or gives it back.
  void give(uint64_t bytes);
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

  const std::function<void(uint64_t bytes)> ask_;
  std::atomic<int64_t> available_{static_cast<int64_t>(kFirstCredit)};
  std::atomic<bool> is_contended_{
      false};  // somebody waits, or nobody gets any: look under the lock
  mutable std::mutex mutex_;
  std::deque<Waiter*> waiters_;  // the first is the next
  std::optional<base::Error> failed_;
  std::mutex ask_mutex_;  // taken before mutex_
  uint64_t asked_ = 0;    // by ask_mutex_: what the other rank has been told
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
  /// What is to be told to the other rank, at once: so many bytes more.
  using Give = std::function<void(uint64_t bytes)>;

  Allowance(uint64_t window, Loans& loans, Give give)
      : window_(std::max(window, kFirstCredit)), loans_(loans), give_(std::move(give)) {}

  /// The connection stands: it is told what it may send. Once.
  void open();
  /// A call of it has come. False if it has sent far more than it may.
  bool on_arrived(uint64_t bytes);
  /// One has begun, or never will. True if that has brought back a loan, which others may wait for.
  bool on_begun(uint64_t bytes);
  /// It waits for `bytes`; 0: no more.
  void on_asked(uint64_t bytes);
  /// Others have given back what was lent to them.
  void try_again();
  /// That rank is lost: what was lent to it is there for others.
  void close();

 private:
  uint64_t owed_locked();

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

}  // namespace distrain::rpc
