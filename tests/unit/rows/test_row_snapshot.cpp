#include <atomic>
#include <cstring>
#include <future>
#include <optional>
#include <stdexcept>
#include <thread>

#include "distrain/base/error.h"
#include "distrain/base/thread_pool.h"
#include "distrain/rows/kernels.h"
#include "distrain/rows/row_snapshot.h"
#include "support/catch.h"

using namespace distrain;
using namespace distrain::rows;

namespace {

constexpr uint64_t kStored = 3000;
constexpr size_t kWidth = 3;

// Rows 0 to kStored - 1, all of whose values are their id.
struct Stored {
  Stored() {
    set_state(options, rule);
    options.initial_value = [](uint64_t id, std::span<float> value) {
      std::ranges::fill(value, static_cast<float>(id));
    };
    store.emplace(options);
    std::vector<uint64_t> ids(kStored);
    for (uint64_t i = 0; i < kStored; ++i) ids[i] = i;
    groups.emplace(ids);
    numbers.resize(groups->size());
    store->read(*groups, numbers, true, nullptr, 0, numbers.size());
    columns = row_columns(options, rule);
  }
  // Adds 1 to all rows.
  void update() {
    const std::vector<float> gradients(kStored * kWidth, -1);
    update_rows(*store, rule, {.lr = 1}, *groups, numbers, {gradients.data()}, 0, groups->size());
  }

  RowRule rule{.optimizer = Optimizer::kSgd};
  RowStoreOptions options{.dim = kWidth};
  std::optional<RowStore> store;
  std::optional<IdGroups> groups;
  std::vector<RowNumber> numbers;
  std::vector<RowColumn> columns;
};

// The values that a snapshot has passed to its Put function, by column.
struct Written {
  explicit Written(uint64_t rows) : times(rows), ids(rows), weights(rows * kWidth), updates(rows) {}

  void put(const RowColumn& column, uint64_t first, std::span<const std::byte> bytes) {
    const size_t count = bytes.size() / column.bytes;
    std::byte* const out = column.name == "ids"      ? reinterpret_cast<std::byte*>(ids.data())
                           : column.name == "weight" ? reinterpret_cast<std::byte*>(weights.data())
                                                     : reinterpret_cast<std::byte*>(updates.data());
    std::memcpy(out + first * column.bytes, bytes.data(), bytes.size());
    if (column.name != "ids") return;
    for (size_t i = 0; i < count; ++i) ++times[first + i];
  }
  // Checks that each row has been put once, as it was before any update.
  void check() const {
    std::vector<bool> seen(kStored);
    REQUIRE(ids.size() == kStored);
    for (size_t i = 0; i < ids.size(); ++i) {
      REQUIRE(times[i] == 1);
      REQUIRE(ids[i] < kStored);
      REQUIRE(!seen[ids[i]]);
      seen[ids[i]] = true;
      REQUIRE(updates[i] == 0);
      for (size_t k = 0; k < kWidth; ++k) {
        REQUIRE(weights[i * kWidth + k] == static_cast<float>(ids[i]));
      }
    }
  }

  std::vector<std::atomic<int>> times;
  std::vector<uint64_t> ids;
  std::vector<float> weights;
  std::vector<uint32_t> updates;
};

}  // namespace

TEST_CASE("the columns of a store follow its optimizer") {
  const auto names = [](Optimizer optimizer) {
    RowStoreOptions options{.dim = 5};
    const RowRule rule{.optimizer = optimizer};
    set_state(options, rule);
    std::vector<std::string> found;
    size_t floats = 0;
    for (const RowColumn& column : row_columns(options, rule)) {
      found.push_back(column.name);
      if (column.offset >= sizeof(Row)) floats += column.bytes / sizeof(float);
      CHECK(column.bytes >= column.numbers * sizeof(float));
    }
    CHECK(floats == options.dim + options.state_floats);
    return found;
  };
  using Names = std::vector<std::string>;
  CHECK(names(Optimizer::kSgd) == Names{"ids", "weight", "updates"});
  CHECK(names(Optimizer::kAdagrad) == Names{"ids", "weight", "updates", "sum"});
  CHECK(names(Optimizer::kRowwiseAdagrad) == Names{"ids", "weight", "updates", "sum"});
  CHECK(names(Optimizer::kRmsProp) == Names{"ids", "weight", "updates", "square_avg"});
  CHECK(names(Optimizer::kAdam) == Names{"ids", "weight", "updates", "exp_avg", "exp_avg_sq"});
}

// Returns the bytes of a log with `slots` slots for a snapshot of `stored`.
size_t log_of(const Stored& stored, size_t slots) {
  return (kStored / 512 + 1) * RowSnapshot::kBytesOfRegion +
         slots * (stored.store->block_bytes() + RowSnapshot::kBytesOfSlot);
}
void write_all(RowSnapshot& snapshot, const RowSnapshot::Put& put) {
  while (snapshot.write_next(put)) {
  }
}

TEST_CASE("a snapshot equals the store at its start while the store is updated") {
  // A log of 1 row or of 7 rows makes updates wait. The third log holds all rows.
  const size_t log_rows = GENERATE(1, 7, kStored);
  const int threads = GENERATE(1, 3);
  Stored stored;
  Written written(kStored);
  RowSnapshot snapshot(*stored.store, stored.rule, log_of(stored, log_rows));
  REQUIRE(snapshot.rows() == kStored);
  const RowSnapshot::Put put = [&](auto... row) { written.put(row...); };
  std::atomic<bool> is_over = false;
  std::atomic<bool> has_updated = false;
  std::vector<std::thread> updating;
  for (int i = 0; i < threads; ++i) {
    updating.emplace_back([&] {
      do {
        stored.update();
        has_updated = true;
      } while (!is_over);
    });
  }
  // Either all rows have been logged, or updates wait before the first row is written.
  while (log_rows == kStored ? !has_updated : snapshot.stalled_s() == 0) std::this_thread::yield();
  write_all(snapshot, put);
  is_over = true;
  for (std::thread& thread : updating) thread.join();
  written.check();
  CHECK((snapshot.stalled_s() > 0) == (log_rows < kStored));
}

TEST_CASE("a full log is emptied while the thread does other work") {
  // Few rows of a region are written one by one; the other case writes whole regions.
  const size_t updated = GENERATE(3, 60);
  Stored stored;
  Written written(kStored);
  RowSnapshot snapshot(*stored.store, stored.rule, log_of(stored, 4 * updated));
  std::vector<uint64_t> ids(kStored / 10);
  for (uint64_t i = 0; i < ids.size(); ++i) ids[i] = 10 * i;
  size_t puts = 0;
  const RowSnapshot::Put put = [&](const RowColumn& column, uint64_t first, auto bytes) {
    if (column.name == "ids") ++puts;
    written.put(column, first, bytes);
  };
  const std::vector<float> gradients(3 * updated * kWidth, -1);
  const auto update = [&](size_t first, size_t count) {
    const IdGroups groups(std::span(ids).subspan(first, count));
    std::vector<RowNumber> numbers(groups.size());
    stored.store->find(groups, numbers);
    update_rows(*stored.store, stored.rule, {.lr = 1}, groups, numbers, {gradients.data()}, 0,
                groups.size());
  };
  update(0, 3 * updated - 1);
  snapshot.empty_log(put);
  CHECK(puts == 0);  // less than three quarters are full
  update(3 * updated - 1, 1);
  snapshot.empty_log(put);
  CHECK(puts > 0);
  if (updated == 60) CHECK(puts < updated);
  write_all(snapshot, put);
  written.check();
  CHECK(snapshot.stalled_s() == 0);
}

TEST_CASE("rows that are made during a snapshot are not in it") {
  Stored stored;
  Written written(kStored);
  RowSnapshot snapshot(*stored.store, stored.rule);
  const std::vector<uint64_t> more = {kStored, kStored + 1};
  const IdGroups groups(more);
  std::vector<RowNumber> numbers(groups.size());
  stored.store->read(groups, numbers, true, nullptr, 0, numbers.size());
  write_all(snapshot, [&](auto... row) { written.put(row...); });
  written.check();
}

TEST_CASE("the snapshot of an empty store has no rows") {
  Stored stored;
  RowStore empty(stored.options);
  RowSnapshot snapshot(empty, stored.rule);
  CHECK_FALSE(snapshot.write_next([](const auto&...) { FAIL("a put without rows"); }));
}

TEST_CASE("updates that wait for a full log go on when the snapshot ends") {
  Stored stored;
  std::optional<RowSnapshot> snapshot(std::in_place, *stored.store, stored.rule, log_of(stored, 1));
  std::thread updating([&] { stored.update(); });
  while (snapshot->stalled_s() == 0) std::this_thread::yield();
  const RowSnapshot::Put fail = [](const auto&...) { throw std::runtime_error("disk full"); };
  CHECK_THROWS_WITH(write_all(*snapshot, fail), "disk full");
  snapshot.reset();
  updating.join();
  Written written(kStored);
  RowSnapshot next(*stored.store, stored.rule);
  write_all(next, [&](auto... row) { written.put(row...); });
  CHECK(written.updates[0] == 1);
}

namespace {

struct CountsBlocks final : base::BlockObserver {
  void on_block() override {
    ++blocks;
    if (is_overloaded) throw base::Exception(base::ErrorKind::kOverloaded, "no thread is left");
  }
  void on_unblock() override { ++unblocks; }
  std::atomic<int> blocks = 0, unblocks = 0;
  bool is_overloaded = false;
};

}  // namespace

TEST_CASE("a thread of a pool that waits for a full log lets the pool grow") {
  CountsBlocks observer;
  observer.is_overloaded = GENERATE(false, true);
  Stored stored;
  Written written(kStored);
  RowSnapshot snapshot(*stored.store, stored.rule, log_of(stored, 1));
  std::thread updating([&] {
    base::thread_state().observer = &observer;
    stored.update();
  });
  while (snapshot.stalled_s() == 0) std::this_thread::yield();
  CHECK(observer.blocks > 0);
  write_all(snapshot, [&](auto... row) { written.put(row...); });
  updating.join();
  written.check();
  CHECK(observer.unblocks == (observer.is_overloaded ? 0 : observer.blocks.load()));
}

TEST_CASE("a lookup that waits for an update that waits for a full log lets the pool grow") {
  Stored stored;
  Written written(kStored);
  RowSnapshot snapshot(*stored.store, stored.rule, log_of(stored, 1));
  base::ThreadPool pool({.size = 1});
  pool.post([&] { stored.update(); });
  while (snapshot.stalled_s() == 0) std::this_thread::yield();
  std::vector<RowNumber> found(stored.numbers.size());
  pool.post([&] { stored.store->find(*stored.groups, found); });
  std::promise<void> answered;
  pool.post([&] { answered.set_value(); });
  CHECK(answered.get_future().wait_for(std::chrono::seconds(60)) == std::future_status::ready);
  write_all(snapshot, [&](auto... row) { written.put(row...); });
  pool.stop();
  written.check();
  CHECK(found == stored.numbers);
}
