// Ranks that save and load tables in parts.
#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "../../../src/job/host/table_parts.h"
#include "../table/tables.h"
#include "support/files.h"

namespace distrain::testing {

using job::Content;
using job::TablePart;
using job::TableParts;

inline constexpr int kServers = 4;
// Two tables, one with two state vectors and one with a number for each row.
inline const std::vector<TableOptions> kTables = {
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

inline std::vector<std::string> names_of(const std::vector<TableOptions>& tables) {
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

inline void add_rows(table::TableServer& server, const std::string& name, Rows& rows) {
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

inline std::vector<Rows> rows_of(TableRanks& ranks) {
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
    for (const auto& entry : std::filesystem::directory_iterator(folder.path("saves"))) {
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

inline std::string table_error(base::ErrorKind kind, const std::function<void()>& call) {
  return error_of(kind, call);
}

}  // namespace distrain::testing
