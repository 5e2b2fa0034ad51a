// Measures the row store and its kernels on one thread: grouping ids, finding rows, the fused
// update and the pooled lookup of 256 bags. Measures also Adagrad for a sparse gradient of a
// tensor, beside the same update by torch's operations. Prints a JSON line for each figure. Usage:
// bench_rows [rows [dim [ids [rounds]]]]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include "distrain/base/clock.h"
#include "distrain/base/random.h"
#include "distrain/optim/update_rule.h"
#include "distrain/rows/kernels.h"

using namespace distrain;
using namespace distrain::rows;

namespace {

constexpr size_t kBags = 256;

struct Config {
  uint64_t rows;
  size_t dim;
  size_t ids;
  int rounds;
};

void measure(const Config& config, const char* what, const std::function<void(int)>& f) {
  std::vector<double> us;
  for (int i = 0; i < config.rounds; ++i) {
    const base::TimePoint start = base::Clock::now();
    f(i);
    us.push_back(base::seconds_since(start) * 1e6);
  }
  std::sort(us.begin(), us.end());
  std::printf(
      "{\"bench\":\"rows\",\"what\":\"%s\",\"rows\":%llu,\"dim\":%zu,\"ids\":%zu,"
      "\"min_us\":%.1f,\"median_us\":%.1f,\"p90_us\":%.1f}\n",
      what, static_cast<unsigned long long>(config.rows), config.dim, config.ids, us[0],
      us[us.size() / 2], us[us.size() * 9 / 10]);
}

void run(const Config& config, const char* name, const RowRule& rule, bool all) {
  RowStoreOptions options{.dim = config.dim, .initial_value = keyed_uniform(1, 0.01F)};
  set_state(options, rule);
  RowStore store(options);
  std::vector<uint64_t> ids(1 << 16);
  std::vector<RowNumber> numbers(ids.size());
  for (uint64_t first = 0; first < config.rows; first += ids.size()) {
    ids.resize(std::min<uint64_t>(ids.size(), config.rows - first));
    std::iota(ids.begin(), ids.end(), first);
    store.read(IdGroups(ids), numbers, true, nullptr, 0, ids.size());
  }

  // Each round has other ids, so that rows come from memory as they do in training.
  const int kinds = std::min(config.rounds, 64);
  std::vector<std::vector<uint64_t>> pushes(kinds);
  std::vector<IdGroups> groups(kinds);
  std::vector<std::vector<RowNumber>> found(kinds);
  base::Random random({2});
  for (int i = 0; i < kinds; ++i) {
    for (size_t k = 0; k < config.ids; ++k) pushes[i].push_back(random.below(config.rows));
    groups[i].assign(pushes[i]);
    found[i].resize(groups[i].size());
    store.find(groups[i], found[i]);
  }
  std::vector<int64_t> offsets;
  for (size_t bag = 0; bag <= kBags; ++bag) {
    offsets.push_back(static_cast<int64_t>(config.ids * bag / kBags));
  }
  const Bags bags{offsets};
  const BagGradients gradients(bags);
  std::vector<float> values(kBags * config.dim, 0.01F);

  if (all) {
    std::printf(
        "{\"bench\":\"rows\",\"what\":\"memory\",\"rule\":\"%s\",\"bytes\":%llu,"
        "\"ratio\":%.3f}\n",
        name, static_cast<unsigned long long>(store.memory_bytes()),
        static_cast<double>(store.memory_bytes()) /
            static_cast<double>(config.rows * (config.dim + options.state_floats) * 4));
    IdGroups fresh;
    measure(config, "group ids", [&](int i) { fresh.assign(pushes[i % kinds]); });
    measure(config, "find", [&](int i) { store.find(groups[i % kinds], found[i % kinds]); });
    std::vector<float> rows(config.ids * config.dim);
    measure(config, "find and copy", [&](int i) {
      const IdGroups& g = groups[i % kinds];
      store.read(g, found[i % kinds], false, rows.data(), 0, g.size());
    });
    const std::vector<uint32_t> row_of = groups[0].inverse();
    std::vector<float> pooled(kBags * config.dim);
    measure(config, "pool", [&](int) {
      pool_rows(rows.data(), config.dim, config.dim, row_of, bags, pooled.data(), 0, kBags);
    });
  }
  measure(config, name, [&](int i) {
    const IdGroups& g = groups[i % kinds];
    update_rows(store, rule, {0.01, i + 1}, g, found[i % kinds], gradients.of(values.data()), 0,
                g.size());
  });
  if (all) {
    IdGroups fresh;
    std::vector<RowNumber> where(config.ids);
    measure(config, "group, find and update", [&](int i) {
      fresh.assign(pushes[i % kinds]);
      store.find(fresh, where);
      update_rows(store, rule, {0.01, i + 1}, fresh, where, gradients.of(values.data()), 0,
                  fresh.size());
    });
  }
}

// Adagrad's update of the rows of `gradient`, by torch's operations.
void adagrad_by_torch(at::Tensor& parameter, at::Tensor& sum, const at::Tensor& gradient) {
  const at::Tensor coalesced = gradient.coalesce();
  const at::Tensor numbers = coalesced._indices().select(0, 0);
  const at::Tensor values = coalesced._values();
  const at::Tensor row_sum = sum.index_select(0, numbers).addcmul_(values, values);
  sum.index_copy_(0, numbers, row_sum);
  parameter.index_add_(0, numbers, values.div(row_sum.sqrt().add_(1e-10)), -0.01);
}

// Compares UpdateRule with adagrad_by_torch() for gradients of one vector per id, as an embedding's
// backward pass makes them.
void run_optimizer(const Config& config) {
  const c10::InferenceMode inference;
  at::set_num_threads(1);
  const auto rows = static_cast<int64_t>(config.rows);
  const auto dim = static_cast<int64_t>(config.dim);
  const auto ids = static_cast<int64_t>(config.ids);
  at::Tensor parameter = at::rand({rows, dim});
  at::Tensor sum = at::zeros({rows, dim});
  std::vector<at::Tensor> gradients;
  for (int i = 0; i < 16; ++i) {
    gradients.push_back(at::sparse_coo_tensor(at::randint(rows, {1, ids}, at::kLong),
                                              at::rand({ids, dim}), {rows, dim}));
  }
  const auto rule = std::make_unique<optim::UpdateRule>(optim::Adagrad{.lr = 0.01});
  measure(config, "optimizer: adagrad",
          [&](int i) { rule->apply(0, parameter, gradients[i % gradients.size()]); });
  measure(config, "torch's operations: adagrad",
          [&](int i) { adagrad_by_torch(parameter, sum, gradients[i % gradients.size()]); });
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, uint64_t otherwise) {
    return argc > i ? std::strtoull(argv[i], nullptr, 10) : otherwise;
  };
  const Config config{number(1, 1 << 20), number(2, 32), number(3, 10'000),
                      static_cast<int>(number(4, 200))};
  run(config, "rowwise-adagrad", {.optimizer = Optimizer::kRowwiseAdagrad}, true);
  run(config, "sgd", {}, false);
  run(config, "adagrad", {.optimizer = Optimizer::kAdagrad}, false);
  run(config, "adam", {.optimizer = Optimizer::kAdam, .eps = 1e-8}, false);
  run_optimizer(config);
}
