// ctest: labels=ci timeout=120
// Tests the parts of tables that servers write and read.
#include <atomic>
#include <csignal>
#include <future>
#include <limits>
#include <thread>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "distrain/rows/kernels.h"
#include "table_ranks.h"

using namespace distrain;
using namespace distrain::testing;
using store::CheckpointStore;

namespace fs = std::filesystem;

TEST_CASE("a load without states leaves the initial state") {
  TableRanks saved(2);
  saved.train();
  TableSaves saves(saved);
  saves.save(1);
  const at::Tensor values = all_rows(*saved.tables);
  // For evaluation: another optimizer, and tables in this process.
  std::vector<TableOptions> options = kTables;
  for (TableOptions& each : options) each.optimizer = {"sgd", {{"lr", 0}}};
  const auto server = std::make_shared<table::TableServer>();
  ShardedEmbedding local(server, options);
  job::load_tables(saves.load(), names_of(options), *server);
  CHECK(at::equal(all_rows(local), values));
  TableRanks loaded(3);
  loaded.parts->load(saves.load(), /*with_states=*/false);
  CHECK(at::equal(all_rows(*loaded.tables), values));
  const Rows of_a = rows_of(loaded)[0];
  for (const auto& [id, numbers] : of_a) {
    for (size_t i = 3; i < numbers.size(); ++i) CHECK(numbers[i] == 0);
  }
}

TEST_CASE("a save has the rows that the tables had when it began") {
  TableRanks ranks(2);
  ranks.train(2);
  const auto expected = rows_of(ranks);
  TableSaves saves(ranks);
  saves.save(2, [&] { ranks.train(3); });
  CHECK(rows_of(ranks) != expected);
  TableRanks loaded(2);
  loaded.parts->load(saves.load(), true);
  CHECK(rows_of(loaded) == expected);
  // The next save has the new rows.
  const auto later = rows_of(ranks);
  saves.save(5);
  TableRanks again(3);
  again.parts->load(saves.load(), true);
  CHECK(rows_of(again) == later);
}

TEST_CASE("tables are saved while trainers update them") {
  TableRanks ranks(2);
  ranks.train();
  TableSaves saves(ranks);
  for (int64_t step = 1; step < 6; ++step) {
    const auto expected = rows_of(ranks);
    std::atomic<bool> is_over = false;
    std::thread training;
    saves.save(step, [&] {
      training = std::thread([&] {
        do {
          ranks.train();
        } while (!is_over);
      });
    });
    is_over = true;
    training.join();
    TableRanks loaded(1);
    loaded.parts->load(saves.load(), true);
    CHECK(rows_of(loaded) == expected);
  }
}

TEST_CASE("servers that do not see the folder send and receive their parts") {
  const bool is_seen = GENERATE(true, false);
  TableRanks ranks(3, kTables, {1, 3});
  ranks.train(2);
  const auto expected = rows_of(ranks);
  TableSaves saves(ranks);
  for (const int64_t step : {1, 2}) saves.save(step);
  REQUIRE(ranks.lines.lines.size() == 3);  // the warning comes once
  CHECK(
      ranks.lines.lines[0]["message"] ==
      "the folder " + saves.folder.path("saves") +
          " of rank 0 is not seen by w1, w3, so their parts of each checkpoint are sent to rank 0");
  job::Snapshot snapshot = saves.load();
  if (!is_seen) snapshot.path = "/nowhere";  // its files are open on rank 0
  for (const int servers : {2, 3}) {
    TableRanks loaded(servers);
    loaded.parts->load(snapshot, true);
    CHECK(rows_of(loaded) == expected);
  }
}

TEST_CASE("tables are loaded from a checkpoint that another job has removed") {
  TableRanks saved(2);
  saved.train();
  TableSaves saves(saved);
  saves.save(1);
  const job::Snapshot snapshot = saves.load();
  const at::Tensor values = all_rows(*saved.tables);
  // Only a part, so that its servers still see the manifest; or all of it.
  if (GENERATE(false, true)) {
    fs::remove_all(snapshot.path);
  } else {
    fs::remove(snapshot.path + "/table-00002-of-00002.safetensors");
  }
  TableRanks loaded(3);
  loaded.parts->load(snapshot, true);
  CHECK(at::equal(all_rows(*loaded.tables), values));
  const auto server = std::make_shared<table::TableServer>();
  ShardedEmbedding local(server, kTables);
  TableParts parts(nullptr, loaded.lines);
  parts.set(names_of(kTables), {0}, server);
  parts.load(snapshot, true);
  CHECK(at::equal(all_rows(local), values));
}

TEST_CASE("a row that is not finite is not saved") {
  TableRanks ranks(kServers, kTables, GENERATE(std::set<int>{}, std::set{3}));
  ranks.train();
  TableSaves saves(ranks);
  saves.save(1);
  const float bad =
      GENERATE(std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity());
  ranks.server(2).store("b").restore(1'000'000, [&](rows::Row& row) {
    row.updates = 0;
    std::fill_n(row.value(), 2, 1.0F);
    row.value()[1] = bad;
  });
  const std::string why =
      table_error(base::ErrorKind::kNotFinite, [&] { saves.save(7, [&] { ranks.train(); }); });
  CHECK(why == "w3: b.weight is not finite at step 7, so it was not saved: try a smaller --lr");
  REQUIRE(saves.told.size() == 1);
  CHECK(saves.names() == std::vector<std::string>{"step-000000000001"});
  ranks.train();  // updates go on
  CHECK(saves.load().step == 1);
}

TEST_CASE("tables that do not fit a checkpoint are refused") {
  TableRanks saved(2);
  saved.train();
  TableSaves saves(saved);
  saves.save(1);
  const job::Snapshot snapshot = saves.load();
  const auto refused = [&](std::vector<TableOptions> options, int servers = 2,
                           bool with_states = true) {
    TableRanks loaded(servers, std::move(options));
    return table_error(base::ErrorKind::kBadData,
                       [&] { loaded.parts->load(snapshot, with_states); });
  };
  const std::string part = snapshot.path + "/table-00001-of-00002.safetensors: ";
  auto changed = kTables;
  changed[0].dim = 4;
  CHECK(refused(changed) == "w1: " + part + "a.weight.00001 has another shape or dtype");
  CHECK(refused(changed, 1, false) == "w1: " + part + "a.weight.00001 has another shape or dtype");
  changed = kTables;
  changed[0].optimizer = {"rmsprop", {{"lr", 0.1}}};
  CHECK(refused(changed) == "w1: " + part + "no a.square_avg.00001");
  changed[0].optimizer = {"sgd", {{"lr", 0.1}}};
  CHECK(refused(changed) == "w1: " + part + "it has tensors that the tables have not");
  changed = kTables;
  changed[1].name = "c";
  CHECK(refused(changed) == snapshot.path + ": it has no table c");
  changed.pop_back();
  CHECK(refused(changed) == snapshot.path + ": it has tables that the model has not");
  job::Snapshot without = snapshot;
  without.state.erase("tables");
  TableRanks loaded(2);
  CHECK(table_error(base::ErrorKind::kBadData, [&] { loaded.parts->load(without, true); }) ==
        snapshot.path + ": it has no tables");
  without = snapshot;
  without.files.erase("table-00002-of-00002");
  CHECK(table_error(base::ErrorKind::kBadData, [&] { loaded.parts->load(without, true); }) ==
        snapshot.path + ": no table-00002-of-00002.safetensors");
  const std::string other = "table-00002-of-00002.safetensors";
  auto& first = loaded.cluster[1].local<TablePart>();
  CHECK(table_error(base::ErrorKind::kBadData, [&] {
          first
              .load({.path = snapshot.path,
                     .hash = snapshot.hash,
                     .files = {{other, snapshot.file("table-00002-of-00002").size()}},
                     .is_own = true,
                     .updates = {{"a", 1}, {"b", 1}},
                     .servers = 2})
              .wait();
        }) == snapshot.path + "/" + other + ": a has a row of another server");
}

namespace {

// Creates the file for the tables of one server, as rank 0 does.
job::PartTarget target_in(store::Saving& saving, int64_t step) {
  job::PartTarget target{.folder = saving.path(),
                         .file = "table-00001-of-00001.safetensors",
                         .nonce = 7,
                         .step = step,
                         .tables = {"a", "b"}};
  saving.create(target.file)
      .write_at(0, {reinterpret_cast<const uint8_t*>(&target.nonce), sizeof target.nonce});
  return target;
}

}  // namespace

TEST_CASE("the thread that saves sleeps as long as it works while rows are updated") {
  using std::chrono::milliseconds;
  const auto at = [](int ms) { return base::TimePoint(std::chrono::hours(1)) + milliseconds(ms); };
  job::Pace pace(at(0));
  CHECK(pace.rest(at(5), 0, false) == milliseconds(0));  // no row was updated
  pace.resume(at(5));
  CHECK(pace.rest(at(8), 1, false) == milliseconds(3));
  pace.resume(at(11));
  CHECK(pace.rest(at(13), 1, false) == milliseconds(2));
  CHECK(pace.rest(at(13), 2, true) == milliseconds(0));  // a log fills
  CHECK(pace.rest(at(112), 2, false) == job::Pace::kLongest);
  CHECK(pace.rest(at(113), 2, false) == milliseconds(0));  // the last update is long ago
  CHECK(pace.rest(at(114), 3, false) == job::Pace::kLongest);
}

TEST_CASE("a save sleeps if rows are updated during the save") {
  const bool updates = GENERATE(false, true);
  const auto server = std::make_shared<table::TableServer>();
  ShardedEmbedding tables(server, kTables);
  tables.look_up({{0, at::arange(40)}, {1, at::arange(40)}});
  std::promise<void> updated;
  PartLines lines;  // the first system call waits for the update
  lines.on_saving = [until = updated.get_future().share()] { until.wait(); };
  std::vector<base::Duration> sleeps;
  TablePart part(nullptr, lines,
                 {.server = server, .sleep = [&](base::Duration rest) { sleeps.push_back(rest); }});
  const Folder folder;
  CheckpointStore store(folder.path());
  const auto saving = store.begin(1, job::Json::object());
  part.begin(target_in(*saving, 1));
  if (updates) {
    const std::vector<uint64_t> ids = {1};
    const rows::IdGroups groups(ids);
    std::vector<rows::RowNumber> numbers(1);
    server->store("b").find(groups, numbers);
    const std::vector<float> gradients = {1, 1};
    rows::update_rows(server->store("b"), server->rule("b"), {.lr = 1}, groups, numbers,
                      {gradients.data()}, 0, 1);
  }
  updated.set_value();
  part.written().wait();
  CHECK(sleeps.empty() != updates);
  for (const base::Duration& rest : sleeps) {
    CHECK(rest > base::Duration::zero());
    CHECK(rest <= job::Pace::kLongest);
  }
}

TEST_CASE("a server notifies rank 0 of progress while it writes its part") {
  std::promise<void> notified;
  const auto until = notified.get_future().share();
  std::atomic<int> notes = 0, system_calls = 0;
  TableRanks ranks(1);
  ranks.train();
  ranks.lines.on_saving = [&] {
    if (++notes == 1) notified.set_value();
  };
  // The server's second system call waits until rank 0 is notified.
  ranks.of_servers.on_saving = [&] {
    if (++system_calls > 1) until.wait();
  };
  const Folder folder;
  CheckpointStore store(folder.path());
  const auto saving = store.begin(1, job::Json::object());
  in_time([&] {
    ranks.parts->begin(*saving, 1);
    return ranks.parts->finish(*saving);
  });
  CHECK(system_calls > 1);
}

namespace {

constexpr int kDiskIsFull = 3;

// Saves the tables of one server, as save_in_child() describes. Returns the exit code.
int save_tables(const std::string& folder, int64_t step, int64_t nth, rlim_t most) {
  const auto server = std::make_shared<table::TableServer>();
  ShardedEmbedding tables(server, kTables);
  tables.look_up({{0, at::arange(40)}, {1, at::arange(40)}});
  PartLines lines;
  TablePart part(nullptr, lines, {.fail_at = nth, .server = server});
  CheckpointStore store(folder);
  const auto saving = store.begin(step, {{"tables", step}});
  const job::PartTarget target = target_in(*saving, step);
  if (most > 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{most, most};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  part.begin(target);
  const auto written = part.written();
  if (written.wait_result().ok()) {
    saving->adopt(target.file, written.wait().sum);
    saving->commit();
    return 0;
  }
  const base::Error& error = written.wait_result().error();
  const bool is_full =
      error.kind == base::ErrorKind::kResources &&
      error.message == "cannot write " + saving->path() + "/" + target.file + ": File too large";
  return is_full ? kDiskIsFull : 4;
}

// Saves the tables of one server in a child process, which is killed at the `nth` system call of
// the server, or whose files may have at most `most` bytes. Returns the exit code of the process,
// or -1 if it was killed.
int save_in_child(const std::string& folder, int64_t step, int64_t nth, rlim_t most = 0) {
  const pid_t child = fork();
  if (child == 0) _exit(save_tables(folder, step, nth, most));
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  if (WIFSIGNALED(status)) REQUIRE(WTERMSIG(status) == SIGKILL);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("a server that is killed at any system call leaves the older checkpoint") {
  const Folder folder;
  REQUIRE(save_in_child(folder.path(), 1, 0) == 0);
  int64_t nth = 1;
  for (int code; (code = save_in_child(folder.path(), 2, nth)) != 0; ++nth) {
    REQUIRE(code == -1);
    CHECK(CheckpointStore::load(folder.path()).step == 1);
  }
  CHECK(nth > 10);
  CHECK(CheckpointStore::load(folder.path()).step == 2);
}

TEST_CASE("a full disk of a server leaves the older checkpoint") {
  const Folder folder;
  REQUIRE(save_in_child(folder.path(), 1, 0) == 0);
  for (const rlim_t most : {1, 1500, 2500}) {
    CHECK(save_in_child(folder.path(), 2, 0, most) == kDiskIsFull);
    CHECK(CheckpointStore::load(folder.path()).step == 1);
  }
  REQUIRE(save_in_child(folder.path(), 2, 0) == 0);
}
