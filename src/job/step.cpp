#include "distrain/job/step.h"

#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/Functions.h>
#include <fmt/format.h>

#include "distrain/rpc/to_device.h"

namespace distrain::job {

Evaluation Evaluation::of(const at::Tensor& scores, const at::Tensor& targets) {
  const at::Tensor here = rpc::to_device(targets, scores.device());
  const at::Tensor loss = at::cross_entropy_loss(scores, here, {}, at::Reduction::Sum);
  Evaluation evaluation;
  evaluation.add(scores, here, loss.item<double>());
  return evaluation;
}

Evaluation Evaluation::of_binary(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor scores = logits.flatten();
  const at::Tensor here = rpc::to_device(targets, scores.device());
  const at::Tensor loss = at::binary_cross_entropy_with_logits(scores, here.to(scores.dtype()), {},
                                                               {}, at::Reduction::Sum);
  const at::Tensor is_positive = here == 1;
  const auto on_host = [&](const at::Tensor& which) {
    return scores.masked_select(which).to(at::kCPU, at::kFloat);
  };
  return {.samples = here.numel(),
          .right = ((scores > 0) == is_positive).sum().item<int64_t>(),
          .loss_sum = loss.item<double>(),
          .positive = {on_host(is_positive)},
          .negative = {on_host(is_positive.logical_not())}};
}

double Evaluation::auc() const {
  const auto joined = [](const std::vector<at::Tensor>& pieces) {
    return pieces.empty() ? at::empty({0}) : at::cat(pieces);
  };
  const at::Tensor above = joined(positive), sorted = std::get<0>(joined(negative).sort());
  const int64_t pairs = above.numel() * sorted.numel();
  const auto has_nan = [](const at::Tensor& x) { return x.isnan().any().item<bool>(); };
  if (pairs == 0 || has_nan(above) || has_nan(sorted)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const auto below = [&](bool or_equal) {
    return at::searchsorted(sorted, above, /*out_int32=*/false, or_equal).sum().item<int64_t>();
  };
  return (static_cast<double>(below(false)) + static_cast<double>(below(true))) /
         (2.0 * static_cast<double>(pairs));
}

void Evaluation::add(const Evaluation& other) {
  samples += other.samples;
  if (other.right) right = right.value_or(0) + *other.right;
  loss_sum += other.loss_sum;
  for (const auto& [name, sum] : other.sums) sums[name] += sum;
  for (const auto& [name, sum] : other.means) means[name] += sum;
  // Joins pieces of similar sizes, so that their number and the time grow with the logarithm.
  const auto append = [](std::vector<at::Tensor>& to, const std::vector<at::Tensor>& more) {
    for (const at::Tensor& piece : more) {
      at::Tensor last = piece;
      for (; !to.empty() && to.back().numel() <= last.numel(); to.pop_back()) {
        last = at::cat({to.back(), last});
      }
      to.push_back(last);
    }
  };
  append(positive, other.positive);
  append(negative, other.negative);
}

void Evaluation::add(const at::Tensor& scores, const at::Tensor& targets, double more_loss) {
  samples += targets.numel();
  right = right.value_or(0) + (scores.argmax(1) == targets).sum().item<int64_t>();
  loss_sum += more_loss;
}

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

}  // namespace distrain::job
