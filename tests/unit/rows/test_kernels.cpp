#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/rows/kernels.h"
#include "distrain/rows/row_store.h"
#include "support/catch.h"

namespace distrain::rows {
namespace {

constexpr size_t kRows = 50;
constexpr size_t kSteps = 4;

std::vector<Isa> isas() {
  std::vector<Isa> result = {Isa::kBaseline};
  if (best_isa() >= Isa::kAvx2) result.push_back(Isa::kAvx2);
  if (best_isa() >= Isa::kAvx512) result.push_back(Isa::kAvx512);
  return result;
}

const std::map<std::string, RowRule>& rules() {
  static const std::map<std::string, RowRule> all = {
      {"sgd", {}},
      {"adagrad",
       {.optimizer = Optimizer::kAdagrad, .lr_decay = 0.1, .initial_accumulator_value = 0.2}},
      {"row-wise adagrad",
       {.optimizer = Optimizer::kRowwiseAdagrad,
        .lr_decay = 0.1,
        .initial_accumulator_value = 0.2}},
      {"adam", {.optimizer = Optimizer::kAdam, .eps = 1e-8}},
      {"adamw", {.optimizer = Optimizer::kAdamW, .eps = 1e-8, .weight_decay = 0.1}},
      {"rmsprop", {.optimizer = Optimizer::kRmsProp, .eps = 1e-8}},
  };
  return all;
}

template <class T>
std::vector<T> random_values(size_t n, uint64_t seed) {
  base::Random random({seed});
  std::vector<T> values(n);
  for (T& x : values) x = static_cast<T>(2 * random.unit() - 1);
  return values;
}

// A row, updated as the formulas of torch.optim say, one float after the other.
struct Reference {
  std::vector<double> w, a, b;
  double row_sum = 0;
  int updates = 0;

  void update(const RowRule& rule, double lr, int step, const std::vector<double>& g) {
    const size_t n = w.size();
    ++updates;
    double squares = 0;
    for (const double x : g) squares += x * x;
    row_sum += squares / static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) {
      switch (rule.optimizer) {
        case Optimizer::kSgd:
          w[i] -= lr * g[i];
          break;
        case Optimizer::kAdagrad:
          a[i] += g[i] * g[i];
          w[i] -= lr / (1 + (step - 1) * rule.lr_decay) * g[i] / (std::sqrt(a[i]) + rule.eps);
          break;
        case Optimizer::kRowwiseAdagrad:
          w[i] -= lr / (1 + (step - 1) * rule.lr_decay) * g[i] / (std::sqrt(row_sum) + rule.eps);
          break;
        case Optimizer::kAdam:
        case Optimizer::kAdamW:
          if (rule.optimizer == Optimizer::kAdamW) w[i] *= 1 - lr * rule.weight_decay;
          a[i] = rule.beta1 * a[i] + (1 - rule.beta1) * g[i];
          b[i] = rule.beta2 * b[i] + (1 - rule.beta2) * g[i] * g[i];
          w[i] -= lr * std::sqrt(1 - std::pow(rule.beta2, step)) /
                  (1 - std::pow(rule.beta1, step)) * a[i] / (std::sqrt(b[i]) + rule.eps);
          break;
        case Optimizer::kRmsProp:
          a[i] = rule.alpha * a[i] + (1 - rule.alpha) * g[i] * g[i];
          w[i] -= lr * g[i] / (std::sqrt(a[i]) + rule.eps);
          break;
      }
    }
  }
};

// The ids of one push, with many repeated ids, in bags of 0 to 6 with weights.
template <class T>
struct Push {
  Push(size_t dim, uint64_t seed) : dim(dim) {
    base::Random random({seed});
    offsets = {0};
    for (size_t bag = 0; bag < 40; ++bag) {
      for (uint64_t k = random.below(7); k > 0; --k) ids.push_back(random.below(kRows));
      offsets.push_back(static_cast<int64_t>(ids.size()));
    }
    weights = random_values<T>(ids.size(), seed + 1);
    values = random_values<T>(dim * 40, seed + 2);
  }

  Bags bags(bool weighted, bool mean) const requires std::is_same_v<T, float> {
    return {offsets, weighted ? std::span<const T>(weights) : std::span<const T>(), mean};
  }
  // Returns the sum of the gradients of each id.
  std::map<uint64_t, std::vector<double>> gradients(bool weighted, bool mean) const {
    std::map<uint64_t, std::vector<double>> sums;
    for (size_t bag = 0; bag + 1 < offsets.size(); ++bag) {
      for (auto p = static_cast<size_t>(offsets[bag]); p < static_cast<size_t>(offsets[bag + 1]);
           ++p) {
        std::vector<double>& sum = sums[ids[p]];
        sum.resize(dim);
        for (size_t i = 0; i < dim; ++i) {
          sum[i] += values[bag * dim + i] * (weighted ? weights[p] : 1) /
                    (mean ? static_cast<double>(offsets[bag + 1] - offsets[bag]) : 1);
        }
      }
    }
    return sums;
  }

  size_t dim;
  std::vector<uint64_t> ids;
  std::vector<int64_t> offsets;
  std::vector<T> weights;
  std::vector<T> values;  // gradients of the bags
};

template <class T>
double largest_difference(const T* values, const std::vector<double>& reference) {
  double largest = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double difference = std::abs(values[i] - reference[i]);
    largest = std::isnan(difference) ? difference : std::max(largest, difference);
    if (std::isnan(difference)) return 1e9;
  }
  return largest;
}

// Trains a table in arrays and returns its values. Checks them against the formulas.
template <class T>
std::vector<T> train_arrays(const RowRule& rule, size_t dim, bool weighted, bool mean, Isa isa,
                            double tolerance) {
  std::vector<T> values = random_values<T>(kRows * dim, 5);
  const auto initial = static_cast<T>(rule.initial_accumulator_value);
  std::array<std::vector<T>, kMaxStates> states;
  for (auto& state : states) state.assign(kRows * dim, initial);
  std::vector<T> row_states(kRows, initial);
  std::vector<Reference> references(kRows);
  for (size_t row = 0; row < kRows; ++row) {
    Reference& r = references[row];
    r.w.assign(values.begin() + row * dim, values.begin() + (row + 1) * dim);
    r.a.assign(dim, rule.initial_accumulator_value);
    r.b.assign(dim, 0);
    r.row_sum = rule.initial_accumulator_value;
  }
  const RowArrays<T> arrays{values.data(), {states[0].data(), states[1].data()}, row_states.data()};
  for (size_t step = 1; step <= kSteps; ++step) {
    const Push<T> push(dim, 100 * step);
    const IdGroups groups(push.ids);
    std::vector<uint32_t> bag_of;
    std::vector<T> factors;
    for (size_t bag = 0; bag + 1 < push.offsets.size(); ++bag) {
      const int64_t size = push.offsets[bag + 1] - push.offsets[bag];
      for (int64_t k = 0; k < size; ++k) {
        factors.push_back((weighted ? push.weights[bag_of.size()] : 1) /
                          (mean ? static_cast<T>(size) : 1));
        bag_of.push_back(static_cast<uint32_t>(bag));
      }
    }
    const Gradients<T> gradients{push.values.data(), bag_of.data(),
                                 weighted || mean ? factors.data() : nullptr};
    update_arrays(arrays, dim, rule, {0.1, static_cast<int64_t>(step), 0.5}, groups, gradients, 0,
                  groups.size(), isa);
    for (auto& [id, g] : push.gradients(weighted, mean)) {
      for (double& x : g) x *= 0.5;
      references[id].update(rule, 0.1, static_cast<int>(step), g);
    }
  }
  double largest = 0;
  for (size_t row = 0; row < kRows; ++row) {
    largest = std::max(largest, largest_difference(values.data() + row * dim, references[row].w));
  }
  CHECK(largest < tolerance);
  return values;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// With and without weights, sums and means. Sums without weights take no factors.
constexpr std::array<std::pair<bool, bool>, 4> kKindsOfBags = {
    {{false, false}, {true, false}, {false, true}, {true, true}}};

}  // namespace

TEST_CASE("row updates in arrays follow the formulas in float64 and float32") {
  for (const auto& [name, rule] : rules()) {
    CAPTURE(name);
    for (const size_t dim : {1, 7, 16, 32, 83}) {
      CAPTURE(dim);
      for (const auto& [weighted, mean] : kKindsOfBags) {
        train_arrays<double>(rule, dim, weighted, mean, best_isa(), 1e-12);
        // Adam's and RMSprop's first steps divide by roots of very small squares.
        train_arrays<float>(rule, dim, weighted, mean, best_isa(), 2e-5);
      }
    }
  }
}

TEST_CASE("a store without state for the rule is not updated") {
  RowStore store({.dim = 4});
  const IdGroups groups(std::vector<uint64_t>{1});
  std::vector<RowNumber> numbers(1);
  store.read(groups, numbers, true, nullptr, 0, numbers.size());
  const std::vector<float> gradient(4, 1);
  CHECK_THROWS_AS(update_rows(store, {.optimizer = Optimizer::kAdam}, {0.1}, groups, numbers,
                              {gradient.data()}, 0, 1),
                  base::Exception);
}

TEST_CASE("all instruction sets give the same bits") {
  for (const auto& [name, rule] : rules()) {
    CAPTURE(name);
    for (const size_t dim : {1, 15, 32, 50, 130}) {
      CAPTURE(dim);
      for (const auto& [weighted, mean] : kKindsOfBags) {
        const auto bits_are_equal = [&, &rule = rule, weighted = weighted,
                                     mean = mean]<class T>(T) {
          const auto train = [&](Isa isa) {
            return train_arrays<T>(rule, dim, weighted, mean, isa, 10);
          };
          const std::vector<T> baseline = train(Isa::kBaseline);
          for (const Isa isa : isas()) CHECK(same_bits(train(isa), baseline));
        };
        bits_are_equal(0.0F);
        bits_are_equal(0.0);
      }
    }
  }
  const Push<float> push(50, 3);
  const IdGroups groups(push.ids);
  const BagGradients gradients(push.bags(true, false));
  const auto norm = [&](Isa isa) {
    return gradient_norm_squared(50, groups, gradients.of(push.values.data()), 0, groups.size(),
                                 isa);
  };
  for (const Isa isa : isas()) CHECK(norm(isa) == norm(Isa::kBaseline));
}

TEST_CASE("row updates in a store follow the formulas, on several threads, too") {
  for (const auto& [name, rule] : rules()) {
    for (const size_t threads : {1, 3}) {
      CAPTURE(name);
      const size_t dim = 19;
      RowStoreOptions options{.dim = dim, .initial_value = keyed_uniform(4, 1)};
      set_state(options, rule);
      RowStore store(options);
      std::map<uint64_t, Reference> references;
      for (size_t step = 1; step <= kSteps; ++step) {
        const Push<float> push(dim, 100 * step);
        const IdGroups groups(push.ids);
        std::vector<RowNumber> numbers(groups.size());
        store.read(groups, numbers, true, nullptr, 0, numbers.size());
        const BagGradients gradients(push.bags(true, true));
        const std::vector<size_t> bounds = groups.split(threads);
        std::vector<std::thread> running;
        for (size_t i = 0; i + 1 < bounds.size(); ++i) {
          running.emplace_back([&, i, &rule = rule] {
            update_rows(store, rule, {0.1, static_cast<int64_t>(step)}, groups, numbers,
                        gradients.of(push.values.data()), bounds[i], bounds[i + 1]);
          });
        }
        for (std::thread& thread : running) thread.join();
        for (auto& [id, g] : push.gradients(true, true)) {
          Reference& r = references[id];
          if (r.w.empty()) {
            std::vector<float> initial(dim);
            options.initial_value(id, initial);
            r.w.assign(initial.begin(), initial.end());
            r.a.assign(dim, rule.initial_accumulator_value);
            r.b.assign(dim, 0);
            r.row_sum = rule.initial_accumulator_value;
          }
          r.update(rule, 0.1, static_cast<int>(step), g);
        }
      }
      CHECK(store.rows() == references.size());
      store.begin_snapshot([](uint64_t, const Row&) {});
      double largest = 0;
      bool counted = true;
      store.save_rows(0, store.rows(), [&](uint64_t, const Row& row) {
        const Reference& r = references.at(row.id);
        largest = std::max(largest, largest_difference(row.value(), r.w));
        counted = counted && row.updates == static_cast<uint32_t>(r.updates);
      });
      CHECK(largest < 2e-5);
      CHECK(counted);
    }
  }
}

TEST_CASE("a gradient for an id without a row is refused before any update") {
  RowStore store({.dim = 2});
  const IdGroups groups(std::vector<uint64_t>{1, 2, 3});
  std::vector<RowNumber> numbers(3);
  store.read(groups, numbers, true, nullptr, 0, numbers.size());
  numbers[2] = kNoRow;
  const std::vector<float> gradient(6, 1);
  CHECK_THROWS_AS(update_rows(store, {}, {1}, groups, numbers, {gradient.data()}, 0, 3),
                  base::Exception);
  std::vector<float> values(6);
  store.read(groups, numbers, false, values.data(), 0, 3);
  CHECK(values == std::vector<float>(6, 0));
}

TEST_CASE("the norm adds the gradients of an id first and shows NaN") {
  const std::vector<uint64_t> ids = {5, 9, 5};
  std::vector<float> gradient = {1, 2, 3, 4, 5, 6};
  const IdGroups groups(ids);
  const auto norm = [&] {
    return gradient_norm_squared(2, groups, {gradient.data()}, 0, groups.size());
  };
  CHECK(norm() == Approx(6 * 6 + 8 * 8 + 3 * 3 + 4 * 4));
  gradient[3] = NAN;
  CHECK(std::isnan(norm()));
  gradient[3] = INFINITY;
  CHECK_FALSE(std::isfinite(norm()));
}

TEST_CASE("the gradients of each id are summed, with and without weights") {
  constexpr size_t kDim = 19;
  const Push<float> push(kDim, 3);
  const IdGroups groups(push.ids);
  std::vector<uint32_t> place_of = groups.inverse();
  for (uint32_t& place : place_of) place *= kDim;
  for (const auto& [weighted, mean] : kKindsOfBags) {
    const BagGradients gradients(push.bags(weighted, mean));
    const auto sums = [&](Isa isa) {
      std::vector<float> result(groups.size() * kDim, NAN);
      sum_gradients(kDim, groups, gradients.of(push.values.data()), place_of, result.data(), 0,
                    groups.size(), isa);
      return result;
    };
    const std::vector<float> baseline = sums(Isa::kBaseline);
    const auto expected = push.gradients(weighted, mean);
    for (size_t i = 0; i < groups.size(); ++i) {
      CHECK(largest_difference(baseline.data() + i * kDim, expected.at(groups.ids()[i])) < 1e-5);
    }
    for (const Isa isa : isas()) CHECK(same_bits(sums(isa), baseline));
  }
}

TEST_CASE("bags are pooled as sums, means and weighted sums, and empty bags are zeros") {
  for (const size_t dim : {1, 16, 37, 64, 200}) {
    RowStore store({.dim = dim, .initial_value = keyed_normal(1, 1)});
    const Push<float> push(dim, 8);
    const IdGroups groups(push.ids);
    std::vector<RowNumber> numbers(groups.size());
    store.find(groups, numbers);  // an evaluation lookup: initial values
    std::vector<float> unseen(groups.size() * dim);
    store.read(groups, numbers, false, unseen.data(), 0, groups.size());
    CHECK(store.rows() == 0);
    store.read(groups, numbers, true, nullptr, 0, numbers.size());
    std::vector<float> values(groups.size() * dim);
    store.read(groups, numbers, false, values.data(), 0, groups.size());
    CHECK(same_bits(values, unseen));
    const std::vector<uint32_t> row_of = groups.inverse();
    for (const bool weighted : {false, true}) {
      for (const bool mean : {false, true}) {
        const Bags bags = push.bags(weighted, mean);
        std::vector<float> pooled(bags.size() * dim, NAN);
        pool_rows(values.data(), dim, dim, row_of, bags, pooled.data(), 0, bags.size());
        double largest = 0;
        for (size_t bag = 0; bag < bags.size(); ++bag) {
          std::vector<double> sum(dim);
          const auto count = static_cast<double>(push.offsets[bag + 1] - push.offsets[bag]);
          for (auto p = push.offsets[bag]; p < push.offsets[bag + 1]; ++p) {
            for (size_t i = 0; i < dim; ++i) {
              const auto at = static_cast<size_t>(p);
              sum[i] += values[row_of[at] * dim + i] * (weighted ? push.weights[at] : 1) /
                        (mean ? count : 1);
            }
          }
          largest = std::max(largest, largest_difference(pooled.data() + bag * dim, sum));
        }
        CHECK(largest < 1e-5);
        for (const Isa isa : isas()) {
          std::vector<float> other(pooled.size());
          pool_rows(values.data(), dim, dim, row_of, bags, other.data(), 0, bags.size(), isa);
          CHECK(same_bits(other, pooled));
        }
      }
    }
  }
}

}  // namespace distrain::rows
