#pragma once

#include <atomic>
#include <memory>
#include <vector>

namespace distrain::rpc {

/// An object for the newest process of each rank. Objects of earlier processes (some hundred bytes
/// each) are kept until the end, because threads may still use them. One thread fills and changes
/// it; when it is filled, any thread may read it.
template <class T>
class PerRank {
 public:
  void add(std::unique_ptr<T> object) {
    current_.push_back(std::make_unique<std::atomic<T*>>(object.get()));
    all_.push_back(std::move(object));
  }
  /// Replaces the object of `rank` by that of the rank's next process.
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
