// ctest: labels=ci timeout=120
// Tests saves and loads of tables that lie on several ranks.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <future>
#include <limits>
#include <numeric>
#include <set>
#include <thread>

#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../src/job/host/table_parts.h"
#include "../table/tables.h"
#include "support/files.h"

using namespace distrain;
using namespace distrain::testing;
using job::Content;
using job::PartTarget;
using job::TablePart;
using job::TableParts;
using store::CheckpointStore;

namespace {

namespace fs = std::filesystem;

constexpr int kServers = 4;
// Two tables, one with two state vectors and one with a number for each row.
const std::vector<TableOptions> kTables = {
    table_of("a", 3, {"adam", {{"lr", 0.1}}}),
    table_of("b", 2, {"rowwise-adagrad", {{"lr", 0.1}}}),
};

class PartLines final : public job::EventSink {
 public:
  void emit(std::string_view event, const job::Json& fields) override {
    if (event == "checkpoint" || event == "warn") lines.push_back(fields);
  }
  void joined(std::string_view, const job::OptionMap&) override {}
  void saving() override {
    if (on_saving) on_saving();
  }
  std::vector<job::Json> lines;  // written by one thread at a time
  std::function<void()> on_saving;
};

std::vector<std::string> names_of(const std::vector<TableOptions>& tables) {
  std::vector<std::string> names;
  for (const TableOptions& table : tables) names.push_back(table.name);
  return names;
}

/// Rank 0, which trains and saves, and servers on ranks 1 to n. Servers of ranks in `senders` do
/// not use rank 0's folder.
struct TableRanks {
  explicit TableRanks(int servers, std::vector<TableOptions> options = kTables,
                      const std::set<int>& senders = {})
      : cluster(servers + 1, [&](rpc::Agent& agent) { set_up(agent, of_servers, senders); }) {
    parts = std::make_shared<TableParts>(&cluster[0], lines);
    cluster[0].provide(parts);
    std::vector<int> ranks(static_cast<size_t>(servers));
    std::iota(ranks.begin(), ranks.end(), 1);
    tables = std::make_shared<ShardedEmbedding>(cluster[0], ranks, options, optim::Sharing{});
    optimizer.emplace(cluster[0], std::vector<optim::ParameterGroup>{}, optim::Sharing{});
    optimizer->add(tables);
    parts->set(names_of(options), ranks);
  }
  static void set_up(rpc::Agent& agent, PartLines& lines, const std::set<int>& senders) {
    set_up_tables(agent);
    TableParts::expose(agent);
    agent.provide(std::make_shared<TablePart>(
        &agent, lines, TablePart::Options{.sends = senders.contains(agent.rank())}));
  }

  void train(int steps = 1) {
    for (int step = 0; step < steps; ++step) {
      autograd::Context context(cluster[0]);
      const auto rows = tables->look_up({{0, at::arange(40)}, {1, at::arange(10, 50)}});
      autograd::backward(context, {rows[0].sin().sum() + rows[1].cos().sum()});
      optimizer->step(context);
    }
    tables->settle();
  }
  table::TableServer& server(int number) { return cluster[number + 1].local<table::TableServer>(); }
  int servers() const { return cluster.size() - 1; }

  PartLines lines, of_servers;
  Cluster cluster;
  std::shared_ptr<TableParts> parts;
  std::shared_ptr<ShardedEmbedding> tables;
  std::optional<optim::DistributedOptimizer> optimizer;
};

/// The rows of a table by id: all numbers of their blocks.
using Rows = std::map<uint64_t, std::vector<float>>;

void add_rows(table::TableServer& server, const std::string& name, Rows& rows) {
  rows::RowStore& store = server.store(name);
  const uint64_t all = store.begin_snapshot([](uint64_t, const rows::Row&) {});
  store.save_rows(0, all, [&](uint64_t, const rows::Row& row) {
    std::vector<float>& numbers = rows[row.id];
    numbers.assign(row.value(), row.value() + store.options().dim + store.options().state_floats);
    numbers.push_back(row.row_state);
    numbers.push_back(static_cast<float>(row.updates));
  });
  store.end_snapshot();
}

std::vector<Rows> rows_of(TableRanks& ranks) {
  std::vector<Rows> all;
  for (const std::string& name : ranks.tables->table_names()) {
    Rows& rows = all.emplace_back();
    for (int k = 0; k < ranks.servers(); ++k) add_rows(ranks.server(k), name, rows);
  }
  return all;
}

/// Saves tables in a folder.
struct TableSaves {
  explicit TableSaves(TableRanks& ranks) : lines(ranks.lines) {
    checkpoints.emplace(
        job::CheckpointOptions{folder.path("saves"), 0, ""}, job::Job{}, lines,
        [this](const base::Error& error) { told.push_back(error); }, ranks.parts.get());
  }
  // Begins a save and calls `then` before the save ends.
  void save(
      int64_t step, const std::function<void()>& then = [] {}) {
    Content content{.step = step};
    content.files["model"] = {job::HeldTensor::of("x", at::full({5}, step))};
    checkpoints->save(std::move(content), {}, base::Clock::now());
    then();
    checkpoints->finish();
  }
  job::Snapshot load() const { return job::read_checkpoint(folder.path("saves")); }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder.path("saves"))) {
      if (entry.path().filename() != ".lock") found.push_back(entry.path().filename());
    }
    std::ranges::sort(found);
    return found;
  }

  const Folder folder;
  PartLines& lines;
  std::vector<base::Error> told;
  std::optional<job::Checkpoints> checkpoints;
};

// Waits if a rank has called this process.
void wait_in_call(const std::shared_future<void>& until) {
  if (!base::thread_state().observer) return;
  const base::BlockingScope waits;
  until.wait();
}

std::string table_error(base::ErrorKind kind, const std::function<void()>& call) {
  return error_of(kind, call);
}

}  // namespace

TEST_CASE("tables that 4 servers save are loaded by 1, 2, 4 and 5") {
  TableRanks saved(kServers);
  saved.train(3);
  TableSaves saves(saved);
  saves.save(3);
  const auto expected = rows_of(saved);
  REQUIRE(expected[0].size() == 40);
  REQUIRE(saved.lines.lines.size() == 1);
  CHECK(saved.lines.lines[0]["stalled_s"] == 0);

  const job::Snapshot snapshot = saves.load();
  CHECK(snapshot.state["tables"]["servers"] == kServers);
  const std::string file = "table-00002-of-00004.safetensors";
  const auto index =
      nlohmann::json::parse(read_text(snapshot.path + "/table.safetensors.index.json"));
  CHECK(index["metadata"]["servers"] == kServers);
  CHECK(index["metadata"]["updates"]["a"] == std::vector<int>{3, 3, 3, 3});
  std::vector<std::string> tensors;
  for (const auto& [tensor, in] : index["weight_map"].items()) {
    if (in == file) tensors.push_back(tensor);
    CHECK(store::read_safetensors(snapshot.path + "/" + in.get<std::string>()).contains(tensor));
  }
  CHECK(tensors == std::vector<std::string>{"a.exp_avg.00002", "a.exp_avg_sq.00002", "a.ids.00002",
                                            "a.updates.00002", "a.weight.00002", "b.ids.00002",
                                            "b.sum.00002", "b.updates.00002", "b.weight.00002"});

  for (const int servers : {1, 2, 4, 5}) {
    CAPTURE(servers);
    TableRanks loaded(servers);
    loaded.parts->load(snapshot, /*with_states=*/true);
    CHECK(rows_of(loaded) == expected);
    for (int k = 0; k < servers; ++k) {
      Rows rows;
      add_rows(loaded.server(k), "a", rows);
      for (const auto& [id, numbers] : rows) {
        CHECK(rows::hash_of_id(id) % static_cast<uint64_t>(servers) == static_cast<uint64_t>(k));
      }
      CHECK(loaded.server(k).updates_of("b") == 3);
    }
    // The optimizer goes on from its state.
    TableRanks same(servers);
    same.parts->load(snapshot, true);
    loaded.train();
    same.train();
    CHECK(rows_of(loaded) == rows_of(same));
  }
  saved.train();
  TableRanks resumed(kServers);
  resumed.parts->load(snapshot, true);
  resumed.train();
  CHECK(rows_of(resumed) == rows_of(saved));
}

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

TEST_CASE("rank 0 refuses pieces outside of a part") {
  TableRanks ranks(1, kTables, {1});
  ranks.train();
  const Folder folder;
  CheckpointStore store(folder.path());
  const auto saving = store.begin(1, job::Json::object());
  const std::string file = "table-00001-of-00001.safetensors";
  const at::Tensor piece = at::zeros({8}, at::kByte);
  CHECK(table_error(base::ErrorKind::kCancelled, [&] { ranks.parts->put(file, 0, piece); }) ==
        file + ": its save has ended");
  ranks.parts->begin(*saving, 1);
  for (const uint64_t offset : {uint64_t{1} << 40, ~uint64_t{0} - 3}) {
    CHECK(table_error(base::ErrorKind::kInvalid, [&] { ranks.parts->put(file, offset, piece); }) ==
          file + " has no such piece");
  }
  ranks.parts->finish(*saving);
}

TEST_CASE("rank 0 adopts only parts that are safetensors files") {
  TableRanks ranks(1);
  ranks.train();
  const Folder folder;
  CheckpointStore store(folder.path());
  const auto saving = store.begin(1, job::Json::object());
  ranks.parts->begin(*saving, 1);
  auto& server = ranks.cluster[1].local<TablePart>();
  server.written().wait();
  const std::string file = saving->path() + "/table-00001-of-00001.safetensors";
  std::string text = read_text(file);
  text[8] = '[';
  write_text(file, text);
  CHECK(table_error(base::ErrorKind::kBadData, [&] { ranks.parts->finish(*saving); }) ==
        file + ": not a safetensors file: its header does not begin with '{'");
  ranks.parts->abandon();
}

TEST_CASE("the failure of a server ends a save while others write") {
  TableRanks ranks(3, kTables, {1});
  ranks.train();
  ranks.server(2).store("b").restore(1'000'000, [&](rows::Row& row) {
    row.updates = 0;
    std::fill_n(row.value(), 2, std::numeric_limits<float>::infinity());
  });
  // Rank 0 takes no pieces of w1 before it has reported the error of w3.
  std::promise<void> reported;
  const auto until = reported.get_future().share();
  ranks.lines.on_saving = [until] { wait_in_call(until); };
  const Folder folder;
  CheckpointStore store(folder.path());
  const auto saving = store.begin(1, job::Json::object());
  ranks.parts->begin(*saving, 1);
  CHECK(table_error(base::ErrorKind::kNotFinite, [&] {
          ranks.parts->finish(*saving);
        }).starts_with("w3: b.weight is not finite"));
  reported.set_value();
  ranks.parts->abandon();
  ranks.train();
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

TEST_CASE("a save that cannot begin leaves the older checkpoint") {
  TableRanks ranks(3);
  ranks.train();
  TableSaves saves(ranks);
  saves.save(1);
  // Another snapshot of a table of w2.
  ranks.server(1).store("b").begin_snapshot([](uint64_t, const rows::Row&) {});
  CHECK(table_error(base::ErrorKind::kInvalid, [&] { saves.save(2); }) ==
        "w2: a table already has a snapshot");
  ranks.server(1).store("b").end_snapshot();
  CHECK(saves.names() == std::vector<std::string>{"step-000000000001"});
  ranks.train();
  saves.save(3);
  TableRanks loaded(1);
  loaded.parts->load(saves.load(), true);
  CHECK(rows_of(loaded) == rows_of(ranks));
}

TEST_CASE("the loss of a server ends a save and lets the other servers go on") {
  const bool while_writing = GENERATE(false, true);
  TableRanks ranks(3, kTables, {1, 2, 3});
  ranks.train();
  TableSaves saves(ranks);
  saves.save(1);
  const auto kill_one = [&] { ranks.cluster.kill(2); };
  std::promise<void> killed;
  if (while_writing) {
    // Rank 0 takes no pieces before the server is killed.
    ranks.lines.on_saving = [until = killed.get_future().share()] { wait_in_call(until); };
  } else {
    kill_one();
  }
  in_time([&] {
    return table_error(base::ErrorKind::kPeerLost, [&] {
      saves.save(2, [&] {
        if (!while_writing) return;
        kill_one();
        killed.set_value();
      });
    });
  });
  CHECK(saves.names() == std::vector<std::string>{"step-000000000001"});
  // The other servers have no snapshot any more, so that another may begin.
  for (const int server : {0, 2}) {
    ranks.server(server).store("a").begin_snapshot([](uint64_t, const rows::Row&) {});
    ranks.server(server).store("a").end_snapshot();
  }
}

TEST_CASE("a save that fails elsewhere ends the snapshots") {
  TableRanks ranks(2);
  ranks.train();
  TableSaves saves(ranks);
  Content content{.step = 1};
  const auto fill = [](Content&) {
    throw base::Exception(base::ErrorKind::kInternal, "no more tensors");
  };
  saves.checkpoints->save(std::move(content), fill, base::Clock::now());
  table_error(base::ErrorKind::kInternal, [&] { saves.checkpoints->finish(); });
  for (const int server : {0, 1}) {
    ranks.server(server).store("a").begin_snapshot([](uint64_t, const rows::Row&) {});
    ranks.server(server).store("a").end_snapshot();
  }
  saves.save(2);
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

TEST_CASE("a damaged part of a table is named") {
  TableRanks saved(2);
  saved.train();
  TableSaves saves(saved);
  saves.save(1);
  saves.save(2);
  const std::string part =
      saves.folder.path("saves/step-000000000002/table-00002-of-00002.safetensors");
  std::string text = read_text(part);
  text.back() ^= 1;
  write_text(part, text);
  CHECK(table_error(base::ErrorKind::kBadData, [&] { saves.load(); }) ==
        part +
            ": damaged: its checksum differs from the one in manifest.json; the one before it is "
            "intact: --resume " +
            saves.folder.path("saves/step-000000000001"));
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
  const std::string file = "table-00001-of-00001.safetensors";
  const PartTarget target{
      .folder = saving->path(), .file = file, .nonce = 7, .step = step, .tables = {"a", "b"}};
  saving->create(file).write_at(
      0, {reinterpret_cast<const uint8_t*>(&target.nonce), sizeof target.nonce});
  if (most > 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{most, most};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  part.begin(target);
  const auto written = part.written();
  if (written.wait_result().ok()) {
    saving->adopt(file, written.wait().sum);
    saving->commit();
    return 0;
  }
  const base::Error& error = written.wait_result().error();
  const bool is_full =
      error.kind == base::ErrorKind::kResources &&
      error.message == "cannot write " + saving->path() + "/" + file + ": File too large";
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
