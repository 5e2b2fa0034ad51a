#pragma once

#include <atomic>
#include <memory>
#include <vector>

namespace distrain::rpc {

/// An object for each rank, of its newest process; those of processes before it stay until the end,
/// as threads may still be in them: some hundred bytes for each rank that was lost and is there
/// again. Filled and changed by one thread; once filled, read by any.
template <class T>
class PerRank {
 public:
  void add(std::unique_ptr<T> object) {
    current_.push_back(std::make_unique<std::atomic<T*>>(object.get()));
    all_.push_back(std::move(object));
  }
  /// Of the rank's next process.
  void replace(int rank, std::unique_ptr<T> object) {
    T* const next = object.get();
    all_.push_back(std::move(object));
    current_[static_cast<size_t>(rank)]->store(next, std::memory_order_release);
  }
  T& at(int rank) const {
    return *current_[static_cast<size_t>(rank)]->load(std::memory_order_acquire);
  }
  int size() const { return static_cast<int>(current_.size()); }

 private:
  std::vector<std::unique_ptr<std::atomic<T*>>> current_;
  std::vector<std::unique_ptr<T>> all_;
};

}  // namespace distrain::rpc
