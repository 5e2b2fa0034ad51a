#include "flow/credit.h"

#include <c10/util/ScopeExit.h>

#include "distrain/base/thread_state.h"

namespace distrain::rpc {

// ---- Window ----

base::Status Window::take(uint64_t bytes, base::TimePoint deadline) {
  if (try_take(bytes)) return base::Unit{};
  Waiter self{bytes, base::Clock::now(), {}};
  const base::BlockingScope blocking;
  const auto dequeuing = c10::make_scope_exit([&] { dequeue(self); });
  enqueue(self);
  std::unique_lock lock(mutex_);
  const auto is_over = [&] { return failed_ || try_serve_locked(self); };
  const bool is_in_time = base::wait_until(self.turn, lock, deadline, is_over);
  if (failed_) return *failed_;
  if (is_in_time) return base::Unit{};
  return base::Error{base::ErrorKind::kOverloaded,
                     "it has not begun, or not answered, enough of the calls before"};
}

void Window::dequeue(const Waiter& waiter) {
  {
    std::lock_guard lock(mutex_);
    std::erase(waiters_, &waiter);
    if (!waiters_.empty()) waiters_.front()->turn.notify_one();
  }
  send_requests();
}

// Returns the next request to send, or nothing if neither `target` nor `returned` has changed.
std::optional<Window::Request> Window::next_request_locked() {
  uint64_t target = last_request_.target;
  const bool is_served = !waiters_.empty() && available_ >= waiters_.front()->bytes;
  if (target <= granted_ && !is_served) {
    if (available_ > size_) {
      returned_ += available_ - size_;
      available_ = size_;
    }
    uint64_t wanted = 0;
    for (const Waiter* waiter : waiters_) {
      if (wanted > 0 && wanted + waiter->bytes > size_ / 8) break;
      wanted += waiter->bytes;
    }
    target = wanted == 0 ? 0 : granted_ - available_ + wanted;
  }
  if (target == last_request_.target && returned_ == last_request_.returned) return std::nullopt;
  last_request_ = {granted_ - available_, target, returned_};
  return last_request_;
}

// Sends requests until none is due. Returns at once if another thread already sends them.
void Window::send_requests() {
  std::unique_lock lock(mutex_);
  if (std::exchange(is_sending_, true)) return;
  while (!failed_) {
    const std::optional<Request> next = next_request_locked();
    if (!next) break;
    lock.unlock();
    ask_(*next);
    lock.lock();
  }
  is_sending_ = false;
}

// ---- Budget ----

Budget::Budget(int ranks, uint64_t total, uint64_t per_peer, uint64_t most_begun)
    : total_(std::max(total, 2 * kFirstCredit * static_cast<uint64_t>(ranks))),
      window_(
          std::max(kFirstCredit, std::min(per_peer, total_ / 2 / static_cast<uint64_t>(ranks)))),
      pool_(total_ - window_ * static_cast<uint64_t>(ranks)),
      most_(std::clamp(per_peer, window_, window_ + pool_)),
      most_begun_(std::max(most_begun, total_)),
      peers_(static_cast<size_t>(ranks)) {}

Budget::Grants Budget::open(ProcessNumber process) {
  Grants grants;
  std::lock_guard lock(mutex_);
  Peer& peer = at(rank_of(process));
  if (peer.incarnation != incarnation_of(process)) return grants;
  peer.is_open = true;
  update_locked(rank_of(process), grants);
  serve_pool_locked(grants);
  return grants;
}

Budget::Grants Budget::ask(int rank, const Window::Request& request) {
  Grants grants;
  std::lock_guard lock(mutex_);
  Peer& peer = at(rank);
  if (!peer.is_here) return grants;
  leave_order_locked(rank);
  const uint64_t unused = request.returned - peer.unused;
  if (request.returned < peer.unused || unused > peer.held() - peer.used ||
      request.spent > peer.granted) {
    wire::Reader::fail("credit that it does not have");
  }
  peer.unused = request.returned;
  peer.tag -= std::min(peer.tag, unused);
  return_locked(peer, unused);
  peer.spent = request.spent;
  const bool is_hungry = request.target > 0;
  if (is_hungry && !peer.is_hungry) peer.tag = std::max(peer.tag, now_);
  peer.is_hungry = is_hungry;
  peer.target = request.target;
  update_locked(rank, grants);
  serve_pool_locked(grants);
  return grants;
}

// Takes back the credit of a call that begins, unless begun calls would then exceed `most_begun_`.
Budget::Grants Budget::begin(Work& work, ProcessNumber from, uint64_t credit) {
  Grants grants;
  work.from = from;
  work.credit = credit;
  if (credit == 0) return grants;
  std::lock_guard lock(mutex_);
  work.is_kept = begun_ > 0 && begun_ + credit > most_begun_;
  if (work.is_kept) {
    work.at = kept_.insert(kept_.end(), &work);
  } else {
    begun_ += credit;
    reclaim_locked(from, credit, grants);
  }
  return grants;
}

Budget::Grants Budget::end(Work& work) {
  Grants grants;
  if (work.credit == 0) return grants;
  std::lock_guard lock(mutex_);
  if (work.is_kept) {
    kept_.erase(work.at);
    reclaim_locked(work.from, work.credit, grants);
  } else {
    begun_ -= work.credit;
  }
  while (!kept_.empty() && (begun_ == 0 || begun_ + kept_.front()->credit <= most_begun_)) {
    Work& first = *kept_.front();
    kept_.pop_front();
    first.is_kept = false;
    begun_ += first.credit;
    reclaim_locked(first.from, first.credit, grants);
  }
  return grants;
}

Budget::Grants Budget::lose(int rank) {
  Grants grants;
  std::lock_guard lock(mutex_);
  Peer& peer = at(rank);
  leave_order_locked(rank);
  peer.is_here = peer.is_open = false;
  return_locked(peer, peer.held());
  serve_pool_locked(grants);
  return grants;
}

void Budget::grant_locked(int rank, uint64_t bytes, Grants& grants) {
  Peer& peer = at(rank);
  pooled_ -= beyond_window(peer);
  peer.granted += bytes;
  pooled_ += beyond_window(peer);
  if (peer.is_hungry) {
    if (order_.empty()) now_ = std::max(now_, peer.tag);
    peer.tag += bytes;
  }
  grants.push_back({process_number(rank, peer.incarnation), bytes});
}

void Budget::reclaim_locked(ProcessNumber from, uint64_t bytes, Grants& grants) {
  Peer& peer = at(rank_of(from));
  if (!peer.is_here || peer.incarnation != incarnation_of(from)) return;
  peer.used -= bytes;
  return_locked(peer, bytes);
  update_locked(rank_of(from), grants);
  serve_pool_locked(grants);
}

// Grants credit within the rank's window, or adds the rank to `order_` if it waits for the pool.
void Budget::update_locked(int rank, Grants& grants) {
  Peer& peer = at(rank);
  leave_order_locked(rank);
  if (!peer.is_open) return;
  const uint64_t room = window_ - std::min(window_, peer.held());
  if (peer.target <= peer.granted) {
    if (room > 0 && room >= window_ / 8) grant_locked(rank, room, grants);
  } else if (peer.target - peer.granted <= room) {
    grant_locked(rank, room, grants);
  } else if (peer.target - peer.returned <= most_ || peer.spent <= peer.returned) {
    order_.emplace(peer.tag, rank);
    peer.is_in_order = true;
  }
}

void Budget::serve_pool_locked(Grants& grants) {
  while (!order_.empty()) {
    const auto [tag, rank] = *order_.begin();
    Peer& peer = at(rank);
    const uint64_t held = peer.target - peer.returned;  // after the grant
    const uint64_t others = pooled_ - beyond_window(peer);
    if (others > 0 && others + (held - window_) > pool_) return;
    leave_order_locked(rank);
    now_ = std::max(now_, tag);
    grant_locked(rank, peer.target - peer.granted, grants);
  }
}

// ---- UnwrittenReplies ----

std::shared_ptr<const void> UnwrittenReplies::count(int rank, uint64_t bytes,
                                                    std::shared_ptr<const void> also) {
  bytes = std::min(bytes, limit_ - limit_ / 8);
  bytes_[static_cast<size_t>(rank)] += bytes;
  auto release = [self = shared_from_this(), rank, bytes,
                  also = std::move(also)](const void*) mutable {
    also = nullptr;
    const uint64_t before = self->bytes_[static_cast<size_t>(rank)].fetch_sub(bytes);
    if (before >= self->limit_ && before - bytes < self->limit_) self->on_room_(rank);
  };
  return {this, std::move(release)};
}

}  // namespace distrain::rpc
