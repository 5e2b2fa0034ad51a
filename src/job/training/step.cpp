#include "distrain/job/step.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <fmt/format.h>

#include "distrain/base/error.h"

namespace distrain::job {

void Share::each_batch(int64_t n, int64_t batch_size,
                       const std::function<void(std::span<const int64_t>)>& use) const {
  for (int64_t at = first(n); at < end(n); at += batch_size) {
    std::vector<int64_t> examples(static_cast<size_t>(std::min(batch_size, end(n) - at)));
    std::iota(examples.begin(), examples.end(), at);
    use(examples);
  }
}

double checked_loss(const at::Tensor& loss, int64_t epoch, int64_t step) {
  if (!loss.defined() || loss.numel() != 1) {
    base::invalid(
        fmt::format("the loss at epoch {}, step {} is not one number: return its mean or "
                    "sum, such as loss.mean()",
                    epoch, step));
  }
  const double value = loss.item<double>();
  if (std::isfinite(value)) return value;
  throw base::Exception(base::ErrorKind::kNotFinite,
                        fmt::format("the loss is {} at epoch {}, step {}: try a smaller --lr",
                                    std::isnan(value) ? "NaN" : "infinite", epoch, step));
}

bool StepLines::add(int64_t number, std::function<Json()> fields) {
  constexpr auto kInterval = std::chrono::seconds(5);
  const base::TimePoint now = base::Clock::now();
  const bool is_due = interval_ ? *interval_ > 0 && number % *interval_ == 0 : now >= next_;
  if (is_due) {
    pending_ = nullptr;
    next_ = now + kInterval;
    sink_.emit(event_, fields());
  } else if (!interval_) {
    pending_ = std::move(fields);
  }
  return is_due;
}

void StepLines::end() {
  if (const auto fields = std::exchange(pending_, nullptr)) sink_.emit(event_, fields());
  next_ = {};
}

}  // namespace distrain::job
