#pragma once

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "distrain/base/future.h"

namespace distrain::base {

/// Completes promises and frees objects in its destructor. Declare it before a lock, so that the
/// lock is released first.
class DeferredTasks {
 public:
  DeferredTasks() = default;
  DeferredTasks(const DeferredTasks&) = delete;
  DeferredTasks& operator=(const DeferredTasks&) = delete;
  ~DeferredTasks() {
    for (Task& each : tasks_) each();
  }

  template <class R>
  void complete(std::shared_ptr<Promise<R>> promise,
                std::type_identity_t<Result<detail::Stored<R>>> result) {
    tasks_.emplace_back([promise = std::move(promise), result = std::move(result)]() mutable {
      promise->complete(std::move(result));
    });
  }
  template <class R>
  void complete(std::vector<Promise<R>> promises,
                std::type_identity_t<Result<detail::Stored<R>>> result) {
    tasks_.emplace_back([promises = std::move(promises), result = std::move(result)]() mutable {
      for (Promise<R>& each : promises) each.complete(result);
    });
  }
  template <class T>
  void free(T object) {
    tasks_.emplace_back([object = std::move(object)] {});
  }

 private:
  std::vector<Task> tasks_;
};

}  // namespace distrain::base
