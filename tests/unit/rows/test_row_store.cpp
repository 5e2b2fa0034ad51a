#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/rows/row_store.h"
#include "support/catch.h"

namespace distrain::rows {
namespace {

std::vector<uint64_t> range(uint64_t first, uint64_t last) {
  std::vector<uint64_t> ids(last - first);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

std::vector<RowNumber> create(RowStore& store, const std::vector<uint64_t>& ids) {
  const IdGroups groups(ids);
  std::vector<RowNumber> numbers(groups.size());
  store.read(groups, numbers, true, nullptr, 0, numbers.size());
  return numbers;
}

// Adds 1 to each value of the rows, as an optimizer does.
void add_one(RowStore& store, const std::vector<uint64_t>& ids) {
  const IdGroups groups(ids);
  std::vector<RowNumber> numbers(groups.size());
  store.find(groups, numbers);
  store.for_each_range(groups, numbers, 0, groups.size(),
                       [&](RowStore::LockedRows& rows, size_t begin, size_t end) {
                         for (size_t i = begin; i < end; ++i) {
                           rows.before_update(i);
                           Row& row = rows[i];
                           for (size_t k = 0; k < store.options().dim; ++k) row.value()[k] += 1;
                           ++row.updates;
                         }
                       });
}

base::ErrorKind kind_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const base::Exception& e) {
    return e.kind();
  }
  return base::ErrorKind::kInternal;
}

}  // namespace

TEST_CASE("ids are grouped with the positions of each in order") {
  base::Random random({7});
  for (const size_t n : {0, 1, 2, 100, 129, 5'000, 70'000}) {
    std::vector<uint64_t> ids(n);
    for (uint64_t& id : ids) id = random.below(n / 2 + 1) * 0x9E3779B97F4A7C15ULL;
    const IdGroups groups(ids);
    std::map<uint64_t, std::vector<uint32_t>> expected;
    for (uint32_t i = 0; i < n; ++i) expected[ids[i]].push_back(i);
    REQUIRE(groups.size() == expected.size());
    CHECK(groups.total() == n);
    CHECK(std::is_sorted(groups.hashes().begin(), groups.hashes().end()));
    const std::vector<uint32_t> inverse = groups.inverse();
    bool equal = true;
    for (size_t i = 0; i < groups.size(); ++i) {
      const auto positions = groups.positions_of(i);
      const auto& wanted = expected[groups.ids()[i]];
      equal = equal && groups.hashes()[i] == hash_of_id(groups.ids()[i]) &&
              std::equal(positions.begin(), positions.end(), wanted.begin(), wanted.end());
      for (const uint32_t position : positions) equal = equal && inverse[position] == i;
    }
    CHECK(equal);
  }
}

TEST_CASE("ids whose hashes agree in the sorted bits are grouped") {
  // Inverts the hash, so that the hashes differ in their low bits only.
  const auto id_of = [](uint64_t z) {
    z = (z ^ (z >> 31) ^ (z >> 62)) * 0x319642B2D24D8EC3ULL;
    z = (z ^ (z >> 27) ^ (z >> 54)) * 0x96DE1B173F119089ULL;
    return (z ^ (z >> 30) ^ (z >> 60)) - 0x9E3779B97F4A7C15ULL;
  };
  std::vector<uint64_t> ids;
  for (uint64_t i = 0; i < 1'000; ++i) ids.push_back(id_of((i * 7) % 200));
  REQUIRE(hash_of_id(ids[3]) == 21);
  const IdGroups groups(ids);
  REQUIRE(groups.size() == 200);
  CHECK(std::is_sorted(groups.hashes().begin(), groups.hashes().end()));
  CHECK(groups.positions_of(7).size() == 5);
  RowStore store({.dim = 1});  // all in one stripe, with one home slot
  create(store, ids);
  CHECK(store.rows() == 200);
}

TEST_CASE("ranges of ids for threads share no stripe") {
  const IdGroups groups(range(0, 10'000));
  const std::vector<size_t> bounds = groups.split(4);
  REQUIRE(bounds.size() == 5);
  CHECK(bounds.front() == 0);
  CHECK(bounds.back() == groups.size());
  for (size_t i = 1; i + 1 < bounds.size(); ++i) {
    CHECK(stripe_of(groups.hashes()[bounds[i] - 1]) != stripe_of(groups.hashes()[bounds[i]]));
    CHECK(std::abs(static_cast<int>(bounds[i]) - static_cast<int>(i) * 2'500) <
          700);  // a stripe has 625
  }
  CHECK(IdGroups().split(4) == std::vector<size_t>{0});
}

TEST_CASE("a training lookup creates rows and an evaluation lookup does not") {
  RowStore store(
      {.dim = 5, .state_floats = 5, .initial_state = 0.5F, .initial_value = keyed_normal(1, 1)});
  const IdGroups groups(range(0, 10));
  std::vector<RowNumber> numbers(10, 0);
  store.find(groups, numbers);
  for (const RowNumber number : numbers) CHECK(number == kNoRow);
  CHECK(store.rows() == 0);
  store.read(groups, numbers, true, nullptr, 0, numbers.size());
  CHECK(store.rows() == 10);
  std::vector<RowNumber> again(10);
  store.find(groups, again);
  CHECK(again == numbers);
  std::vector<float> value(5);
  store.for_each_range(
      groups, numbers, 0, 10, [&](RowStore::LockedRows& rows, size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
          Row& row = rows[i];
          CHECK(reinterpret_cast<uintptr_t>(&row) % 16 == 0);
          CHECK(row.id == groups.ids()[i]);
          CHECK(row.updates == 0);
          CHECK(row.row_state == 0.5F);
          store.options().initial_value(row.id, value);
          CHECK(std::equal(value.begin(), value.end(), row.value()));
          CHECK(std::all_of(row.value() + 5, row.value() + 10, [](float x) { return x == 0.5F; }));
        }
      });
}

TEST_CASE("initial values depend only on seed and id") {
  std::vector<float> a(100'001);
  std::vector<float> b(a.size());
  keyed_normal(3, 2)(9, a);
  keyed_normal(3, 2)(9, b);
  CHECK(a == b);
  keyed_normal(4, 2)(9, b);
  CHECK(a != b);
  double sum = 0;
  double squares = 0;
  for (const float x : a) {
    sum += x;
    squares += x * x;
  }
  CHECK(std::abs(sum / a.size()) < 0.03);
  CHECK(std::sqrt(squares / a.size()) == Approx(2).epsilon(0.02));
  keyed_uniform(3, 0.25F)(9, a);
  CHECK(*std::max_element(a.begin(), a.end()) <= 0.25F);
  CHECK(*std::min_element(a.begin(), a.end()) >= -0.25F);
  CHECK(*std::max_element(a.begin(), a.end()) > 0.24F);
}

TEST_CASE("a row store refuses a row above max_rows") {
  RowStore store({.dim = 2, .max_rows = 100});
  create(store, range(0, 100));
  CHECK(kind_of([&] { create(store, range(50, 101)); }) == base::ErrorKind::kResources);
  CHECK(store.rows() == 100);
  create(store, range(0, 100));  // the existing rows are found
  CHECK(kind_of([] { RowStore({.dim = 0}); }) == base::ErrorKind::kInvalid);
}

TEST_CASE("a row store needs little more memory than its rows and state") {
  const uint64_t n = testing::kSanitized ? 1 << 16 : 1 << 20;
  RowStore store({.dim = 16, .state_floats = 16});
  CHECK(store.memory_bytes() < 64 << 10);
  for (uint64_t first = 0; first < n; first += 1 << 15)
    create(store, range(first, first + (1 << 15)));
  CHECK(store.rows() == n);
  CHECK(store.memory_bytes() < n * 128 * (testing::kSanitized ? 1.7 : 1.4));
}

TEST_CASE("rows that are larger than a chunk are stored") {
  RowStore store({.dim = 1 << 20, .initial_value = keyed_uniform(1, 1)});
  const std::vector<RowNumber> numbers = create(store, range(0, 3));
  CHECK(store.rows() == 3);
  add_one(store, range(0, 3));
}

TEST_CASE("restored rows are found, and a second row with an id is refused") {
  RowStore store({.dim = 2});
  const auto fill = [](Row& row) {
    row.updates = 4;
    row.row_state = 3;
    row.value()[0] = 1;
    row.value()[1] = 2;
  };
  store.restore(77, fill);
  CHECK(kind_of([&] { store.restore(77, fill); }) == base::ErrorKind::kBadData);
  const IdGroups groups(std::vector<uint64_t>{77});
  std::vector<RowNumber> numbers(1);
  store.find(groups, numbers);
  store.for_each_range(groups, numbers, 0, 1, [&](RowStore::LockedRows& rows, size_t, size_t) {
    CHECK(rows[0].updates == 4);
    CHECK(rows[0].value()[1] == 2);
  });
}

TEST_CASE("a snapshot has the rows of its beginning although updates go on") {
  RowStore store({.dim = 1});
  create(store, range(0, 1'000));
  add_one(store, range(0, 1'000));  // all values are 1
  std::map<uint64_t, float> saved;
  std::set<uint64_t> positions;
  size_t logged = 0;
  const auto keep = [&](uint64_t position, const Row& row) {
    CHECK(positions.insert(position).second);
    CHECK(saved.emplace(row.id, row.value()[0]).second);
  };
  const uint64_t rows = store.begin_snapshot([&](uint64_t position, const Row& row) {
    ++logged;
    keep(position, row);
  });
  CHECK(rows == 1'000);
  CHECK(kind_of([&] { store.begin_snapshot([](uint64_t, const Row&) {}); }) ==
        base::ErrorKind::kInvalid);
  store.save_rows(0, 300, keep);
  CHECK(saved.size() == 300);
  add_one(store, range(0, 500));       // some of them are saved
  create(store, range(1'000, 1'200));  // not in the snapshot
  add_one(store, range(400, 1'100));
  CHECK(logged > 500);
  for (uint64_t first = 300; first < rows; first += 64) store.save_rows(first, first + 64, keep);
  store.end_snapshot();
  CHECK(saved.size() == 1'000);
  CHECK(*positions.rbegin() == 999);
  for (const auto& [id, value] : saved) CHECK(value == 1);
  const size_t before = logged;
  add_one(store, range(0, 1'200));
  CHECK(logged == before);

  // The order is the same in the next snapshot.
  std::vector<uint64_t> first_order, second_order;
  for (auto* order : {&first_order, &second_order}) {
    CHECK(store.begin_snapshot([](uint64_t, const Row&) {}) == 1'200);
    store.save_rows(0, 1'200, [&](uint64_t, const Row& row) { order->push_back(row.id); });
    store.end_snapshot();
  }
  CHECK(first_order.size() == 1'200);
  CHECK(first_order == second_order);
}

TEST_CASE("threads create and update rows at the same time") {
  RowStore store({.dim = 4});
  constexpr int kThreads = 4;
  constexpr int kRounds = 20;
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        const auto ids =
            range(100 * static_cast<uint64_t>(t), 100 * static_cast<uint64_t>(t) + 500);
        create(store, ids);
        add_one(store, ids);
      }
    });
  }
  std::thread saver([&] {
    while (!done) {
      std::atomic<uint64_t> passed{0};
      const auto count = [&](uint64_t, const Row&) { ++passed; };
      const uint64_t rows = store.begin_snapshot(count);
      for (uint64_t first = 0; first < rows; first += 100) {
        while (!store.save_rows(first, first + 100, count)) std::this_thread::yield();
      }
      store.end_snapshot();
      if (passed != rows) std::abort();
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  saver.join();
  CHECK(store.rows() == 800);
  double sum = 0;
  store.begin_snapshot([](uint64_t, const Row&) {});
  store.save_rows(0, 800, [&](uint64_t, const Row& row) { sum += row.value()[3]; });
  store.end_snapshot();
  CHECK(sum == kThreads * kRounds * 500);
}

}  // namespace distrain::rows
