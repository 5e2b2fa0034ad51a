#include <atomic>
#include <cstring>
#include <future>
#include <optional>
#include <stdexcept>
#include <thread>

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
    store->find_or_create(*groups, numbers);
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

TEST_CASE("a snapshot equals the store at its start while the store is updated") {
  // A log of 1 row or of 7 rows makes updates wait. The third log holds all rows.
  const size_t log_rows = GENERATE(1, 7, kStored);
  const int threads = GENERATE(1, 3);
  Stored stored;
  Written written(kStored);
  RowSnapshot snapshot(*stored.store, log_rows * stored.store->block_bytes());
  REQUIRE(snapshot.rows() == kStored);
  const RowSnapshot::Put put = [&](auto... row) { written.put(row...); };
  if (log_rows < kStored) snapshot.begin(stored.columns, put);
  std::atomic<bool> is_over = false;
  std::promise<void> has_updated;
  std::vector<std::thread> updating;
  for (int i = 0; i < threads; ++i) {
    updating.emplace_back([&, i] {
      do {
        stored.update();
        if (i == 0 && !is_over) {
          try {
            has_updated.set_value();
          } catch (const std::future_error&) {
          }
        }
      } while (!is_over);
    });
  }
  if (log_rows == kStored) {
    has_updated.get_future().wait();  // all rows have been logged
    snapshot.begin(stored.columns, put);
  }
  snapshot.write();
  is_over = true;
  for (std::thread& thread : updating) thread.join();
  written.check();
  if (log_rows == kStored) CHECK(snapshot.stalled_s() == 0);
}

TEST_CASE("an update that waits for a full log is counted") {
  Stored stored;
  Written written(kStored);
  RowSnapshot snapshot(*stored.store, stored.store->block_bytes());
  const RowSnapshot::Put put = [&](auto... row) {
    while (snapshot.stalled_s() == 0) std::this_thread::yield();
    written.put(row...);
  };
  snapshot.begin(stored.columns, put);
  std::thread updating([&] { stored.update(); });
  updating.join();
  snapshot.write();
  written.check();
  CHECK(snapshot.stalled_s() > 0);
}

TEST_CASE("rows that are made during a snapshot are not in it") {
  Stored stored;
  Written written(kStored);
  RowSnapshot snapshot(*stored.store);
  const std::vector<uint64_t> more = {kStored, kStored + 1};
  const IdGroups groups(more);
  std::vector<RowNumber> numbers(groups.size());
  stored.store->find_or_create(groups, numbers);
  const RowSnapshot::Put put = [&](auto... row) { written.put(row...); };
  snapshot.begin(stored.columns, put);
  snapshot.write();
  written.check();
}

TEST_CASE("a failed or stopped snapshot lets waiting updates go on") {
  const bool fails = GENERATE(true, false);
  CAPTURE(fails);
  Stored stored;
  {
    RowSnapshot snapshot(*stored.store, stored.store->block_bytes());
    const RowSnapshot::Put put = [&](const RowColumn&, uint64_t, std::span<const std::byte>) {
      throw std::runtime_error("disk full");
    };
    if (!fails) snapshot.stop(std::make_exception_ptr(std::runtime_error("stopped")));
    snapshot.begin(stored.columns, put);
    std::thread updating([&] { stored.update(); });
    CHECK_THROWS_WITH(snapshot.write(), fails ? "disk full" : "stopped");
    updating.join();
  }
  RowSnapshot(*stored.store);  // the next one may begin
}

TEST_CASE("a log that is full before the save begins ends the save and no update waits") {
  Stored stored;
  {
    Written written(kStored);
    RowSnapshot snapshot(*stored.store, stored.store->block_bytes());
    stored.update();
    const RowSnapshot::Put put = [&](auto... row) { written.put(row...); };
    snapshot.begin(stored.columns, put);
    CHECK_THROWS_WITH(snapshot.write(), ContainsSubstring("filled the log of a save"));
  }
  RowSnapshot(*stored.store);  // the next one may begin
}

TEST_CASE("an update that waits when the snapshot is dropped goes on") {
  Stored stored;
  std::optional<RowSnapshot> snapshot(std::in_place, *stored.store, stored.store->block_bytes());
  std::promise<void> waits;
  const RowSnapshot::Put wait = [&](const auto&...) {
    while (snapshot->stalled_s() == 0) std::this_thread::yield();
    waits.set_value();
    throw std::runtime_error("dropped");
  };
  snapshot->begin(stored.columns, wait);
  std::thread updating([&] { stored.update(); });
  waits.get_future().wait();
  snapshot.reset();
  updating.join();
  Written written(kStored);
  RowSnapshot next(*stored.store);
  const RowSnapshot::Put put = [&](auto... row) { written.put(row...); };
  next.begin(stored.columns, put);
  next.write();
  CHECK(written.updates[0] == 1);
}
