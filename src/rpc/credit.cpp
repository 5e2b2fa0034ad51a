#include "credit.h"

#include <algorithm>
#include <utility>

#include "distrain/base/thread_state.h"

namespace distrain::rpc {

// ---- Credit ----

bool Credit::try_take(uint64_t bytes) {
  return !is_contended_.load(std::memory_order_acquire) &&
         take_at_once(static_cast<int64_t>(bytes));
}

base::Status Credit::take(uint64_t bytes, base::TimePoint deadline) {
  if (try_take(bytes)) return base::Unit{};
  return wait(static_cast<int64_t>(bytes), deadline);
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
      return base::Error{base::ErrorKind::kOverloaded,
                         "it has not begun, or not answered, enough of the calls before",
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

// What was said last is what holds: one thread at a time says it, and looks again when it has.
void Credit::say_what_is_waited_for() {
  std::unique_lock lock(mutex_);
  if (std::exchange(is_saying_, true)) return;
  while (!failed_) {
    uint64_t wanted = 0;
    uint64_t returned = 0;
    if (waiters_.empty()) {
      returned = unneeded_loan_locked();
    } else {
      wanted = static_cast<uint64_t>(waiters_.front()->bytes);
    }
    if (wanted == std::exchange(asked_, wanted) && returned == 0) break;
    lock.unlock();
    ask_(wanted, returned);
    lock.lock();
  }
  is_saying_ = false;
}

// What is not there is in use, and paid back with the calls that use it.
uint64_t Credit::unneeded_loan_locked() {
  const uint64_t lent = std::exchange(lent_, 0);
  if (lent == 0) return 0;
  int64_t available = available_.load();
  for (;;) {
    const int64_t unneeded = std::min(available, static_cast<int64_t>(lent));
    if (unneeded <= 0) return 0;
    if (available_.compare_exchange_weak(available, available - unneeded)) {
      return static_cast<uint64_t>(unneeded);
    }
  }
}

void Credit::give(uint64_t bytes, uint64_t lent) {
  available_.fetch_add(static_cast<int64_t>(bytes));
  {
    std::lock_guard lock(mutex_);
    lent_ += lent;
    if (!waiters_.empty()) return waiters_.front()->turn.notify_one();
    if (lent == 0) return;
  }
  say_what_is_waited_for();  // who asked for it has given up
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
  if (window_ > kFirstCredit) give_(window_ - kFirstCredit, 0);
}

bool Allowance::on_arrived(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  waiting_ += bytes;
  return waiting_ <= 2 * window_ + lent_;  // its loop may owe some
}

bool Allowance::on_begun(uint64_t bytes) {
  Owed owed;
  {
    std::lock_guard lock(mutex_);
    waiting_ -= bytes;
    unreturned_ += bytes;
    if (asked_ == 0 && unreturned_ < window_ / 8) return false;
    owed = owed_locked();
  }
  if (owed.bytes > 0) give_(owed.bytes, owed.lent);
  return owed.repaid > 0;
}

bool Allowance::on_asked(uint64_t bytes, uint64_t returned) {
  Owed owed;
  {
    std::lock_guard lock(mutex_);
    asked_ = bytes;
    const uint64_t repaid = repay_locked(returned);
    unreturned_ += returned - repaid;  // calls had paid for that already
    if (asked_ > 0) owed = owed_locked();
    owed.repaid += repaid;
  }
  if (owed.bytes > 0) give_(owed.bytes, owed.lent);
  return owed.repaid > 0;
}

bool Allowance::try_again() {
  Owed owed;
  {
    std::lock_guard lock(mutex_);
    if (asked_ > 0) owed = owed_locked();
  }
  if (owed.bytes > 0) give_(owed.bytes, owed.lent);
  return owed.repaid > 0;
}

void Allowance::close() {
  std::lock_guard lock(mutex_);
  loans_.take_back(std::exchange(lent_, 0));
  asked_ = 0;
}

uint64_t Allowance::repay_locked(uint64_t bytes) {
  const uint64_t repaid = std::min(lent_, bytes);
  lent_ -= repaid;
  if (repaid > 0) loans_.take_back(repaid);
  return repaid;
}

// What is to be given now: all that was begun, less what pays back a loan that nobody waits for any
// more, or more by a loan.
Allowance::Owed Allowance::owed_locked() {
  Owed owed{std::exchange(unreturned_, 0)};
  if (asked_ <= window_) {
    owed.repaid = repay_locked(owed.bytes);
    owed.bytes -= owed.repaid;
  } else if (waiting_ == 0 && asked_ - window_ > lent_) {
    const uint64_t more = asked_ - window_ - lent_;
    if (loans_.lend(more)) {
      lent_ += more;
      owed.bytes += more;
      owed.lent = more;
    }
  }
  return owed;
}

// ---- CallsInWork ----

void CallsInWork::begin(Call& call, ProcessNumber from, uint64_t credit) {
  call.from = from;
  call.credit = credit;
  if (credit == 0) return;
  if (admit(credit)) return give_back_(from, credit);
  {
    std::lock_guard lock(mutex_);
    call.was_kept = call.is_kept = true;
    call.at = kept_.insert(kept_.end(), &call);
    keeps_some_ = true;
  }
  admit_kept();  // one that has ended meanwhile did not see it
}

void CallsInWork::end(Call& call) {
  if (call.credit == 0) return;
  if (call.was_kept) {
    std::unique_lock lock(mutex_);
    if (call.is_kept) {
      kept_.erase(call.at);
      keeps_some_ = !kept_.empty();
      lock.unlock();
      return give_back_(call.from, call.credit);
    }
  }
  admitted_ -= call.credit;
  if (keeps_some_) admit_kept();
}

// One that is larger than all that may be there is there alone.
bool CallsInWork::admit(uint64_t bytes) {
  uint64_t admitted = admitted_.load();
  while (admitted == 0 || admitted + bytes <= limit_) {
    if (admitted_.compare_exchange_weak(admitted, admitted + bytes)) return true;
  }
  return false;
}

void CallsInWork::admit_kept() {
  for (;;) {
    ProcessNumber from = 0;
    uint64_t credit = 0;
    {
      std::lock_guard lock(mutex_);
      if (kept_.empty() || !admit(kept_.front()->credit)) return;
      Call& first = *kept_.front();
      from = first.from;
      credit = first.credit;
      first.is_kept = false;
      kept_.pop_front();
      keeps_some_ = !kept_.empty();
    }
    give_back_(from, credit);
  }
}

}  // namespace distrain::rpc
