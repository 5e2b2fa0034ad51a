#include "work.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace distrain::collective {

Work::Work(int rank, c10d::OpType type, std::vector<Pending> operations,
           std::vector<at::Tensor> results)
    : c10d::Work(rank, type), operations_(std::move(operations)), results_(std::move(results)) {}

bool Work::isCompleted() { return std::ranges::all_of(operations_, &Pending::done); }

std::exception_ptr Work::exception() const {
  for (const Pending& operation : operations_) {
    if (!operation.done()) continue;
    try {
      operation.wait();
    } catch (...) {
      return std::current_exception();
    }
  }
  return nullptr;
}

bool Work::isSuccess() const {
  return std::ranges::all_of(operations_, &Pending::done) && exception() == nullptr;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) {
    for (const Pending& operation : operations_) operation.wait();
    return true;
  }
  const base::TimePoint limit = base::deadline_after(timeout);
  for (const Pending& operation : operations_) {
    if (operation.wait_until(limit)) continue;
    operation.expire();
    operation.wait();
  }
  return true;
}

void Work::abort() {
  for (const Pending& operation : operations_) {
    operation.fail({base::ErrorKind::kCancelled, "the collective was aborted", rank_});
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  struct Progress {
    std::atomic<size_t> missing;
    std::atomic<bool> failed{false};
  };
  auto progress = std::make_shared<Progress>();
  progress->missing = operations_.size();
  if (operations_.empty()) future->markCompleted(c10::IValue(results_));
  for (const Pending& operation : operations_) {
    operation.future().state()->on_ready(
        [future, progress, results = results_](base::Result<base::Unit>& result) {
          if (!result.ok() && !progress->failed.exchange(true)) {
            future->setError(std::make_exception_ptr(base::Exception(result.error())));
          }
          if (--progress->missing == 0 && !progress->failed) {
            future->markCompleted(c10::IValue(results));
          }
        });
  }
  return future;
}

}  // namespace distrain::collective
