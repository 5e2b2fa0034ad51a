#include "communicator_set.h"

#include <vector>

#include <pthread.h>

namespace distrain::cuda {

using base::Error;
using base::ErrorKind;

constexpr std::chrono::milliseconds kCheckEvery{20};

static void abort_detached(const std::shared_ptr<DeviceCommunicator>& communicator) {
  communicator->detached->run([communicator] {
    rpc::make_current(communicator->stream.device());
    communicator->nccl->abort();
  });
}

void DetachedTasks::run(base::Task task) noexcept {
  {
    std::lock_guard lock(mutex_);
    ++running_;
  }
  const auto shared = std::make_shared<base::Task>(std::move(task));
  const auto work = [self = shared_from_this(), shared] {
    (*shared)();
    *shared = base::Task();  // destroy the captures before the task counts as done
    std::lock_guard lock(self->mutex_);
    --self->running_;
    self->changed_.notify_all();
  };
  try {
    std::thread(work).detach();
  } catch (...) {  // the system cannot start a thread
    work();
  }
}

void CommunicatorSet::add(size_t number, std::shared_ptr<DeviceCommunicator> communicator) {
  std::unique_lock lock(mutex_);
  if (failure_->error()) {
    lock.unlock();
    return abort_detached(communicator);
  }
  communicators_[number] = std::move(communicator);
}

void CommunicatorSet::end(const Error& error) {
  // Set the error before abort(), which may hang and lets streams go on with wrong results.
  if (!failure_->fail(error)) return;
  std::unique_lock lock(mutex_);
  const auto communicators = std::exchange(communicators_, {});
  lock.unlock();
  for (const auto& [number, communicator] : communicators) abort_detached(communicator);
}

struct Watchdog::Item {
  const std::shared_ptr<CommunicatorSet> set;
  const std::shared_ptr<DeviceCommunicator> communicator;
  const std::string op;
  const base::TimePoint since = base::Clock::now();
  std::optional<rpc::StreamPoint> done{};        // guarded by the Watchdog's mutex
  std::optional<base::TimePoint> nccl_failed{};  // used by the Watchdog's thread only
};

std::shared_ptr<Watchdog::Item> Watchdog::begin(std::shared_ptr<CommunicatorSet> set,
                                                std::shared_ptr<DeviceCommunicator> communicator,
                                                std::string op) {
  auto item = std::make_shared<Item>(Item{std::move(set), std::move(communicator), std::move(op)});
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  items_.push_back(item);
  if (items_.size() == 1) changed_.notify_all();
  return item;
}

void Watchdog::enqueued(const std::shared_ptr<Item>& item, rpc::StreamPoint done) {
  std::lock_guard lock(mutex_);
  item->done = std::move(done);
}

void Watchdog::run() noexcept {
  pthread_setname_np(pthread_self(), "distrain-nccl");
  std::unique_lock lock(mutex_);
  for (bool last = false; !last;) {
    changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
    changed_.wait_for(lock, kCheckEvery, [this] { return stopping_; });
    last = stopping_;
    lock.unlock();
    try {
      check();
    } catch (...) {  // out of memory: retry
    }
    lock.lock();
  }
}

// Queries devices, NCCL and the group without holding mutex_.
void Watchdog::check() {
  std::vector<std::pair<std::shared_ptr<Item>, std::optional<rpc::StreamPoint>>> items;
  {
    std::lock_guard lock(mutex_);
    for (const auto& item : items_) items.emplace_back(item, item->done);
  }
  for (const auto& [item, done] : items) {
    std::optional<Error> error;
    rpc::make_current(item->communicator->stream.device());
    try {
      if ((done && done->reached()) || item->set->failure()->error()) {
        forget(item);
        continue;
      }
      error = reason_to_end(*item);
    } catch (...) {  // the device has failed
      error = base::current_error(ErrorKind::kResources);
      error->rank = options_.world_rank;
      error->op = item->op;
    }
    if (!error) continue;
    item->set->end(*error);
    forget(item);
  }
}

std::optional<Error> Watchdog::reason_to_end(Item& item) const {
  if (auto lost = options_.lost()) return lost;
  const base::TimePoint now = base::Clock::now();
  if (std::unique_lock use(item.communicator->in_use, std::try_to_lock); use) {
    if (const auto text = item.communicator->nccl->failure()) {
      if (!item.nccl_failed) item.nccl_failed = now;
      if (now - *item.nccl_failed < options_.loss_grace) return std::nullopt;
      return Error{ErrorKind::kResources, "NCCL: " + *text, options_.world_rank, item.op};
    }
  }
  if (options_.timeout.count() == 0 || now - item.since <= options_.timeout) return std::nullopt;
  return Error{ErrorKind::kDeadline,
               "the deadline of an operation over NCCL passed: a rank that had agreed to it did "
               "not do its part",
               -1, item.op};
}

}  // namespace distrain::cuda
