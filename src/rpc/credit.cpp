#include "credit.h"

#include <algorithm>
#include <utility>

#include "distrain/base/thread_state.h"

namespace distrain::rpc {

// ---- Credit ----

base::Status Credit::take(uint64_t bytes, base::TimePoint deadline) {
  const auto wanted = static_cast<int64_t>(bytes);
  if (!is_contended_.load(std::memory_order_acquire)) {
    if (take_at_once(wanted)) return base::Unit{};
    if (base::thread_state().must_not_wait) {
      available_.fetch_sub(wanted);
      return base::Unit{};
    }
  }
  return wait(wanted, deadline);
}

base::Status Credit::wait(int64_t bytes, base::TimePoint deadline) {
  Waiter self;
  self.bytes = bytes;
  self.since = base::Clock::now();
  {
    std::lock_guard lock(mutex_);
    if (failed_) return *failed_;
    if (base::thread_state().must_not_wait) {
      available_.fetch_sub(bytes);
      return base::Unit{};
    }
    waiters_.push_back(&self);
    is_contended_.store(true, std::memory_order_release);
  }
  struct Leaving {
    Credit& credit;
    Waiter& self;
    ~Leaving() {
      {
        std::lock_guard lock(credit.mutex_);
        auto& waiters = credit.waiters_;
        waiters.erase(std::find(waiters.begin(), waiters.end(), &self));
        if (!waiters.empty()) waiters.front()->turn.notify_one();
        if (waiters.empty() && !credit.failed_) credit.is_contended_ = false;
      }
      credit.say_what_is_waited_for();
    }
  } leaving{*this, self};
  const base::BlockingScope blocking;
  say_what_is_waited_for();
  return wait_for_turn(self, deadline);
}

base::Status Credit::wait_for_turn(Waiter& self, base::TimePoint deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (failed_) return *failed_;
    if (waiters_.front() == &self && take_at_once(self.bytes)) return base::Unit{};
    if (deadline == base::kNever) {
      self.turn.wait(lock);
    } else if (base::Clock::now() >= deadline) {
      return base::Error{base::ErrorKind::kDeadline,
                         "it has not begun enough of the calls that it was sent before",
                         -1,
                         {}};
    } else {
      self.turn.wait_until(lock, deadline);
    }
  }
}

// All or nothing: if it took some for a moment, who else looks in that moment would wait for
// nobody.
bool Credit::take_at_once(int64_t bytes) {
  int64_t available = available_.load();
  while (available >= bytes) {
    if (available_.compare_exchange_weak(available, available - bytes)) return true;
  }
  return false;
}

// What was said last is what holds, whoever came first.
void Credit::say_what_is_waited_for() {
  std::lock_guard asking(ask_mutex_);
  uint64_t wanted = 0;
  {
    std::lock_guard lock(mutex_);
    if (failed_) return;
    if (!waiters_.empty()) wanted = static_cast<uint64_t>(waiters_.front()->bytes);
  }
  if (wanted == std::exchange(asked_, wanted)) return;
  ask_(wanted);
}

void Credit::give(uint64_t bytes) {
  available_.fetch_add(static_cast<int64_t>(bytes));
  std::lock_guard lock(mutex_);
  if (!waiters_.empty()) waiters_.front()->turn.notify_one();
}

void Credit::fail(const base::Error& error) {
  std::lock_guard lock(mutex_);
  if (failed_) return;
  failed_ = error;
  is_contended_.store(true, std::memory_order_release);
  for (Waiter* waiter : waiters_) waiter->turn.notify_one();
}

std::optional<base::TimePoint> Credit::waiting_since() const {
  std::lock_guard lock(mutex_);
  if (waiters_.empty()) return std::nullopt;
  return waiters_.front()->since;
}

// ---- Loans ----

// One that is larger than all that may be lent is lent alone.
bool Loans::lend(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (lent_ > 0 && lent_ + bytes > limit_) return false;
  lent_ += bytes;
  return true;
}

void Loans::take_back(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  lent_ -= bytes;
}

// ---- Allowance ----

void Allowance::open() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(is_open_, true)) return;
  }
  if (window_ > kFirstCredit) give_(window_ - kFirstCredit);
}

bool Allowance::on_arrived(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  waiting_ += bytes;
  return waiting_ <= 2 * window_ + lent_;  // its loop may owe some
}

bool Allowance::on_begun(uint64_t bytes) {
  uint64_t owed = 0;
  bool has_repaid = false;
  {
    std::lock_guard lock(mutex_);
    waiting_ -= bytes;
    unreturned_ += bytes;
    if (asked_ == 0 && unreturned_ < window_ / 8) return false;
    const uint64_t before = lent_;
    owed = owed_locked();
    has_repaid = lent_ < before;
  }
  if (owed > 0) give_(owed);
  return has_repaid;
}

void Allowance::on_asked(uint64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    asked_ = bytes;
  }
  try_again();
}

void Allowance::try_again() {
  uint64_t owed = 0;
  {
    std::lock_guard lock(mutex_);
    if (asked_ == 0) return;
    owed = owed_locked();
  }
  if (owed > 0) give_(owed);
}

void Allowance::close() {
  std::lock_guard lock(mutex_);
  loans_.take_back(std::exchange(lent_, 0));
  asked_ = 0;
}

// What is to be given now: all that was begun, less what pays back a loan that nobody waits for any
// more, or more by a loan.
uint64_t Allowance::owed_locked() {
  uint64_t owed = std::exchange(unreturned_, 0);
  if (asked_ <= window_) {
    const uint64_t repaid = std::min(lent_, owed);
    lent_ -= repaid;
    owed -= repaid;
    if (repaid > 0) loans_.take_back(repaid);
  } else if (waiting_ == 0 && asked_ - window_ > lent_) {
    const uint64_t more = asked_ - window_ - lent_;
    if (loans_.lend(more)) {
      lent_ += more;
      owed += more;
    }
  }
  return owed;
}

}  // namespace distrain::rpc
