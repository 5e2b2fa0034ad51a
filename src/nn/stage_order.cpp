#include "stage_order.h"

namespace distrain::nn {

base::Future<StageOrder::AdmissionPtr> StageOrder::admit(PipelineStep::Kind kind,
                                                         int64_t micro_batch) {
  const Key key(kind, micro_batch);
  {
    std::lock_guard lock(mutex_);
    if (error_) return base::Future<AdmissionPtr>::failed(*error_);
    const size_t first = std::min(next_ + (is_admitted_ ? 1 : 0), row_.size());
    const auto left = row_.begin() + static_cast<std::ptrdiff_t>(first);
    if (waiting_.contains(key) ||
        std::none_of(left, row_.end(), [&](const auto& step) { return key_of(step) == key; })) {
      return base::Future<AdmissionPtr>::failed(
          {base::ErrorKind::kInvalid, "the schedule of this stage has no such step left"});
    }
    if (is_admitted_ || key_of(row_[next_]) != key) return waiting_[key].future();
    is_admitted_ = true;
  }
  return base::Future<AdmissionPtr>::ready(std::make_shared<Admission>(shared_from_this()));
}

void StageOrder::finish() {
  decltype(waiting_)::node_type next;
  {
    std::lock_guard lock(mutex_);
    is_admitted_ = false;
    ++next_;
    if (error_ || next_ >= row_.size()) return;
    next = waiting_.extract(key_of(row_[next_]));
    if (!next) return;
    is_admitted_ = true;
  }
  next.mapped().set(std::make_shared<Admission>(shared_from_this()));
}

void StageOrder::fail(const base::Error& why) {
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
