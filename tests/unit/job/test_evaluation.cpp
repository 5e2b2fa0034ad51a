#include <cmath>

#include <ATen/Functions.h>

#include "distrain/base/random.h"
#include "distrain/job/step.h"
#include "support/catch.h"

namespace distrain::job {
namespace {

// Scores of which many are equal, and their classes.
struct Examples {
  explicit Examples(uint64_t seed, int64_t count = 500) {
    base::Random random({seed});
    for (int64_t i = 0; i < count; ++i) {
      classes.push_back(random.unit() < 0.3 ? 1 : 0);
      logits.push_back(static_cast<float>(random.between(-10, 10)) / 4 +
                       static_cast<float>(classes.back()));
    }
  }
  Evaluation evaluate(int64_t first, int64_t end) const {
    return Evaluation::of_binary(at::tensor(logits).slice(0, first, end).unsqueeze(1),
                                 at::tensor(classes, at::kLong).slice(0, first, end));
  }

  std::vector<float> logits;
  std::vector<int64_t> classes;
};

}  // namespace

TEST_CASE("the area under the ROC curve is the share of pairs in the right order") {
  const Examples examples(1);
  int64_t right = 0, equal = 0, pairs = 0;
  for (size_t p = 0; p < examples.logits.size(); ++p) {
    for (size_t n = 0; n < examples.logits.size(); ++n) {
      if (examples.classes[p] != 1 || examples.classes[n] != 0) continue;
      ++pairs;
      right += examples.logits[p] > examples.logits[n] ? 1 : 0;
      equal += examples.logits[p] == examples.logits[n] ? 1 : 0;
    }
  }
  const double expected =
      (static_cast<double>(right) + 0.5 * static_cast<double>(equal)) / static_cast<double>(pairs);
  const Evaluation whole = examples.evaluate(0, 500);
  CHECK(whole.auc() == expected);
  // The shares of several trainers, one of them empty, give the same.
  Evaluation merged;
  for (const auto& [first, end] : {std::pair<int64_t, int64_t>{0, 123}, {123, 123}, {123, 500}}) {
    merged.add(examples.evaluate(first, end));
  }
  CHECK(merged.auc() == expected);
  CHECK(merged.samples == 500);
  CHECK(merged.right == whole.right);
}

TEST_CASE("without examples of one class there is no area under the ROC curve") {
  const at::Tensor ones = at::ones({3}, at::kLong);
  CHECK(std::isnan(Evaluation::of_binary(at::randn({3}), ones).auc()));
  CHECK(Evaluation::of_binary(at::randn({3}), ones).has_auc());
  CHECK_FALSE(Evaluation().has_auc());
}

TEST_CASE("a score that is not a number leaves no area under the ROC curve") {
  const at::Tensor classes = at::tensor({0, 1, 0, 1}, at::kLong);
  const at::Tensor logits = at::tensor({0.1F, 0.2F, 0.3F, 0.4F});
  CHECK(Evaluation::of_binary(logits, classes).auc() == 0.75);
  for (int64_t i = 0; i < 4; ++i) {
    const at::Tensor bad = logits.clone();
    bad[i] = std::nan("");
    CHECK(std::isnan(Evaluation::of_binary(bad, classes).auc()));
  }
}

TEST_CASE("the scores of many batches are kept in few pieces") {
  const Examples examples(3);
  Evaluation merged;
  for (int64_t i = 0; i < 500; i += 4) merged.add(examples.evaluate(i, i + 4));
  CHECK(merged.positive.size() < 12);
  CHECK(merged.negative.size() < 12);
  CHECK(merged.auc() == examples.evaluate(0, 500).auc());
}

TEST_CASE("the loss of a binary evaluation is the log loss") {
  const Examples examples(2);
  double sum = 0;
  int64_t right = 0;
  for (size_t i = 0; i < examples.logits.size(); ++i) {
    const double probability = 1 / (1 + std::exp(-static_cast<double>(examples.logits[i])));
    sum -= std::log(examples.classes[i] == 1 ? probability : 1 - probability);
    right += (probability > 0.5) == (examples.classes[i] == 1) ? 1 : 0;
  }
  const Evaluation evaluation = examples.evaluate(0, 500);
  CHECK(evaluation.loss() == Approx(sum / 500).epsilon(1e-6));
  CHECK(evaluation.right == right);
}

}  // namespace distrain::job
