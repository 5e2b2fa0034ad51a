// ctest: labels=ci timeout=120
// Tests rank 0's side of saves and loads of tables that lie on several ranks.
#include <atomic>
#include <future>
#include <limits>

#include "table_ranks.h"

using namespace distrain;
using namespace distrain::testing;
using store::CheckpointStore;

namespace {

// Waits if a rank has called this process.
void wait_in_call(const std::shared_future<void>& until) {
  if (!base::thread_state().observer) return;
  const base::BlockingScope waits;
  until.wait();
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

TEST_CASE("rank 0 syncs the files of all servers before a server begins") {
  std::vector<std::string> calls;  // of rank 0
  std::atomic<int> syncs = 0;
  std::atomic<bool> is_early = false;
  TableRanks ranks(2);
  ranks.train();
  ranks.of_servers.on_saving = [&] {
    if (syncs < 2) is_early = true;
  };
  const Folder folder;
  CheckpointStore store(folder.path(), [&](const char* name) {
    calls.emplace_back(name);
    if (calls.back() == "fsync") ++syncs;
  });
  const auto saving = store.begin(1, job::Json::object());
  calls.clear();
  syncs = 0;
  ranks.parts->begin(*saving, 1);
  CHECK(calls ==
        std::vector<std::string>{"openat", "pwrite", "fsync", "openat", "pwrite", "fsync"});
  ranks.parts->finish(*saving);
  CHECK_FALSE(is_early);
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
