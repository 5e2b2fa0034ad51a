#pragma once

#include "distrain/job/checkpoints.h"
#include "table_part.h"

namespace distrain::job {

/// The tables of a job, as rank 0 saves and loads them: Note [Tables in parts]. One thread saves or
/// loads at a time.
class TableParts {
 public:
  /// `agent` is null if the tables are in this process.
  TableParts(rpc::Agent* agent, EventSink& sink) : agent_(agent), sink_(sink) {}

  /// Exposes the functions that ranks call for parts. Must be called before join(). Each rank also
  /// provides a TablePart, and rank 0 a TableParts.
  static void expose(rpc::Agent& agent);

  /// Sets the tables and the ranks that have them, or `here` if they are in this process.
  void set(std::vector<std::string> tables, std::vector<int> servers,
           const std::shared_ptr<table::TableServer>& here = {}) {
    tables_ = std::move(tables);
    servers_ = std::move(servers);
    server_ = here;
    if (here)
      here_ = std::make_shared<TablePart>(nullptr, sink_, TablePart::Options{.server = here});
  }
  bool empty() const { return tables_.empty(); }

  /// While no trainer makes steps: begins a snapshot on all servers, which start to write it.
  /// Returns the content of the checkpoint's state, from which load() learns the number of parts.
  Json begin(store::Saving& saving, int64_t step);
  /// Waits until all parts are written, and adds them and their index. Returns the longest time for
  /// which updates of a server have waited. If a server fails, throws its error at once, which
  /// names the server.
  double finish(store::Saving& saving);
  /// Ends the snapshots of all servers. On return no server writes.
  void abandon();
  /// Makes all servers load the tables of `snapshot`.
  void load(const Snapshot& snapshot, bool with_states);

  /// Called by servers while they save.
  void note_progress() { sink_.saving(); }
  // Called by servers that do not see the folder.
  void put(const std::string& file, uint64_t offset, const at::Tensor& bytes);
  at::Tensor get(const std::string& file, uint64_t offset, uint64_t bytes) const;

 private:
  // A part of the current save.
  struct Part {
    const std::string file;
    store::OutputFile output;
    base::Promise<uint64_t> bytes{};  // size that the file will have
  };
  template <auto Method, class... Args>
  auto call(size_t server, const Args&... args);
  std::string name_of(size_t server) const {
    return agent_ ? agent_->worker(servers_[server]).name : "";
  }
  template <class T>
  void check(const std::vector<base::Future<T>>& replies) const;

  rpc::Agent* const agent_;
  EventSink& sink_;
  std::vector<std::string> tables_;
  std::vector<int> servers_;
  std::shared_ptr<table::TableServer> server_;  // if it is in this process
  std::shared_ptr<TablePart> here_;
  Json begun_;  // result of begin()
  std::vector<base::Future<WrittenPart>> writing_;
  bool has_warned_ = false;  // of servers that send their parts

  mutable std::mutex mutex_;                  // guards what follows
  std::vector<std::shared_ptr<Part>> parts_;  // by server
  const Snapshot* loading_ = nullptr;
};

/// Loads `tables` of `server`, which is in this process, from the open files of `snapshot`.
void load_tables(const Snapshot& snapshot, const std::vector<std::string>& tables,
                 table::TableServer& server, bool with_states = false);

}  // namespace distrain::job
