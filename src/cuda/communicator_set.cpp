#include "communicator_set.h"

#include <utility>
#include <vector>

#include <pthread.h>

namespace distrain::cuda {

using base::Error;
using base::ErrorKind;

namespace {

constexpr std::chrono::milliseconds kLookEvery{20};

}  // namespace

std::shared_ptr<Lane> CommunicatorSet::find(size_t number) const {
  std::lock_guard lock(mutex_);
  const auto it = lanes_.find(number);
  return it == lanes_.end() ? nullptr : it->second;
}

void CommunicatorSet::add(size_t number, std::shared_ptr<Lane> lane) {
  std::lock_guard lock(mutex_);
  if (error_) lane->nccl->abort();
  lanes_[number] = std::move(lane);
}

void CommunicatorSet::end(const Error& error) {
  std::lock_guard lock(mutex_);
  if (error_) return;
  error_ = error;
  for (auto& [number, lane] : lanes_) lane->nccl->abort();
}

std::optional<Error> CommunicatorSet::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

class Watch::Item {
 public:
  Item(std::shared_ptr<CommunicatorSet> set_in, std::shared_ptr<Lane> lane_in)
      : set(std::move(set_in)), lane(std::move(lane_in)), since(base::Clock::now()) {}

  const std::shared_ptr<CommunicatorSet> set;
  const std::shared_ptr<Lane> lane;
  const base::TimePoint since;
  std::optional<rpc::StreamPoint> done;  // guarded by the Watch's mutex
};

Watch::Watch(std::function<std::optional<Error>()> failure, std::chrono::milliseconds timeout)
    : failure_(std::move(failure)), timeout_(timeout) {}

Watch::~Watch() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Watch::Item> Watch::begin(std::shared_ptr<CommunicatorSet> set,
                                          std::shared_ptr<Lane> lane) {
  auto item = std::make_shared<Item>(std::move(set), std::move(lane));
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  items_.push_back(item);
  if (items_.size() == 1) changed_.notify_all();
  return item;
}

void Watch::enqueued(const std::shared_ptr<Item>& item, rpc::StreamPoint done) {
  std::lock_guard lock(mutex_);
  item->done = std::move(done);
}

void Watch::forget(const std::shared_ptr<Item>& item) {
  std::lock_guard lock(mutex_);
  items_.remove(item);
}

void Watch::run() {
  pthread_setname_np(pthread_self(), "distrain-nccl");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
    if (stopping_) return;  // communicators let their last work run when they go
    changed_.wait_for(lock, kLookEvery, [this] { return stopping_; });
    lock.unlock();
    look();
    lock.lock();
  }
}

// Devices, NCCL and the group are asked without the lock.
void Watch::look() {
  std::vector<std::pair<std::shared_ptr<Item>, std::optional<rpc::StreamPoint>>> items;
  {
    std::lock_guard lock(mutex_);
    for (const auto& item : items_) items.emplace_back(item, item->done);
  }
  std::optional<Error> lost = failure_();
  for (const auto& [item, done] : items) {
    if (done && done->reached()) {
      forget(item);
      continue;
    }
    std::optional<Error> error = lost;
    if (std::unique_lock use(item->lane->in_use, std::try_to_lock); !error && use) {
      if (const auto text = item->lane->nccl->failure()) {
        error = Error{ErrorKind::kResources, "NCCL: " + *text, -1, {}};
      }
    }
    if (!error && timeout_.count() > 0 && base::Clock::now() - item->since > timeout_) {
      error = Error{ErrorKind::kDeadline,
                    "the deadline of an operation over NCCL passed: a rank that had agreed to it "
                    "did not do its part",
                    -1,
                    {}};
    }
    if (!error) continue;
    item->set->end(*error);
    forget(item);
  }
}

}  // namespace distrain::cuda
