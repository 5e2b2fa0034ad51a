#include "turns.h"

#include <algorithm>

#include "distrain/base/error.h"

namespace distrain::scenario {

namespace {

base::Error cancelled() {
  return {base::ErrorKind::kCancelled, "another step of this stage has failed", -1, {}};
}

}  // namespace

Turns::Turn::~Turn() {
  if (turns_) turns_->finish(false);
}

void Turns::Turn::done() { std::exchange(turns_, nullptr)->finish(true); }

void Turns::begin(std::vector<PipelineStep> row) {
  fail_waiting(cancelled());
  std::lock_guard lock(mutex_);
  row_ = std::move(row);
  next_ = 0;
  taken_ = false;
  failed_ = false;
}

base::Future<Turns::TurnPtr> Turns::enter(const PipelineStep& step) {
  {
    std::lock_guard lock(mutex_);
    if (failed_) return base::Future<TurnPtr>::failed(cancelled());
    const size_t first = next_ + (taken_ ? 1 : 0);
    if (std::find(row_.begin() + static_cast<std::ptrdiff_t>(std::min(first, row_.size())),
                  row_.end(), step) == row_.end()) {
      return base::Future<TurnPtr>::failed(
          {base::ErrorKind::kInvalid, "the schedule of this stage has no such step left", -1, {}});
    }
    if (taken_ || !(row_[next_] == step)) {
      return waiting_[{step.kind, step.micro_batch}].future();
    }
    taken_ = true;
  }
  return base::Future<TurnPtr>::ready(std::make_shared<Turn>(*this));
}

void Turns::finish(bool well) {
  if (!well) {
    {
      std::lock_guard lock(mutex_);
      failed_ = true;
    }
    return fail_waiting(cancelled());
  }
  std::optional<base::Promise<TurnPtr>> next;
  {
    std::lock_guard lock(mutex_);
    taken_ = false;
    ++next_;
    if (failed_ || next_ == row_.size()) return;
    const auto it = waiting_.find({row_[next_].kind, row_[next_].micro_batch});
    if (it == waiting_.end()) return;
    next = std::move(it->second);
    waiting_.erase(it);
    taken_ = true;
  }
  next->set(std::make_shared<Turn>(*this));
}

void Turns::fail_waiting(const base::Error& error) {
  decltype(waiting_) waiting;
  {
    std::lock_guard lock(mutex_);
    waiting.swap(waiting_);
  }
  for (auto& [key, promise] : waiting) promise.fail(error);
}

}  // namespace distrain::scenario
