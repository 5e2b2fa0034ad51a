#include "turns.h"

#include <algorithm>

namespace distrain::nn {

Turns::Turn::~Turn() { fail({base::ErrorKind::kCancelled, "a step of this stage was abandoned"}); }

void Turns::Turn::done() { std::exchange(turns_, nullptr)->finish(); }

void Turns::Turn::fail(const base::Error& error) {
  if (const auto turns = std::exchange(turns_, nullptr)) turns->fail(error);
}

base::Future<Turns::TurnPtr> Turns::enter(PipelineStep::Kind kind, int64_t micro_batch) {
  const Key key(kind, micro_batch);
  {
    std::lock_guard lock(mutex_);
    if (error_) return base::Future<TurnPtr>::failed(*error_);
    const size_t first = std::min(next_ + (taken_ ? 1 : 0), row_.size());
    const auto left = row_.begin() + static_cast<std::ptrdiff_t>(first);
    if (waiting_.contains(key) ||
        std::none_of(left, row_.end(), [&](const auto& step) { return key_of(step) == key; })) {
      return base::Future<TurnPtr>::failed(
          {base::ErrorKind::kInvalid, "the schedule of this stage has no such step left"});
    }
    if (taken_ || key_of(row_[next_]) != key) return waiting_[key].future();
    taken_ = true;
  }
  return base::Future<TurnPtr>::ready(std::make_shared<Turn>(shared_from_this()));
}

void Turns::finish() {
  decltype(waiting_)::node_type next;
  {
    std::lock_guard lock(mutex_);
    taken_ = false;
    ++next_;
    if (error_ || next_ >= row_.size()) return;
    next = waiting_.extract(key_of(row_[next_]));
    if (!next) return;
    taken_ = true;
  }
  next.mapped().set(std::make_shared<Turn>(shared_from_this()));
}

void Turns::fail(const base::Error& why) {
  decltype(waiting_) failing;
  base::Error first;
  {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = why;
    first = *error_;
    failing.swap(waiting_);
  }
  for (auto& [key, promise] : failing) promise.fail(first);
}

}  // namespace distrain::nn
