#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/job/checkpoints.h"
#include "distrain/rpc/agent.h"
#include "distrain/store/checkpoint_store.h"
#include "distrain/table/table_server.h"

namespace distrain::job {

// Note [Tables in parts]
//
// Each server of tables writes its rows to a file of its own, `table-00001-of-00004.safetensors`,
// in the temporary folder of rank 0's save: TablePart. Rank 0 lets all servers begin, adopts their
// files and commits the checkpoint: TableParts.
//
//   hold    While no trainer makes steps, each server begins a snapshot of its tables.
//   write   A thread of the server writes the snapshot while training continues.
//   load    A thread of the server reads the rows that belong to it from all parts.
//
// A server that does not see rank 0's folder sends its pieces to rank 0 and reads pieces from it.
// Rank 0 keeps no more than these pieces in memory.
//
// If a server fails or is lost, its reply is an error, and rank 0 abandons the save. Before it
// removes the folder, it waits for the replies of all servers, so that none writes there any more.

/// The beginning of the names of the files of tables.
inline constexpr const char* kTableFiles = "table-";

/// The file to which a server writes its part of a checkpoint.
struct PartTarget {
  std::string folder;  ///< empty: it sends the part to rank 0
  std::string file;
  int64_t step = 0;
  static constexpr auto kFields =
      std::tuple(&PartTarget::folder, &PartTarget::file, &PartTarget::step);
};

struct WrittenPart {
  store::FileSum sum;  ///< unset if rank 0 has written the file
  std::vector<std::string> tensors;
  double stalled_s = 0;  ///< time for which updates have waited for the save
  static constexpr auto kFields =
      std::tuple(&WrittenPart::sum, &WrittenPart::tensors, &WrittenPart::stalled_s);
};

/// The parts of a checkpoint from which a server reads its rows.
struct PartSource {
  std::string path;                         ///< of the checkpoint, as rank 0 sees it
  uint64_t manifest = 0;                    ///< content_hash() of its manifest
  std::map<std::string, uint64_t> files;    ///< sizes of the parts to read, by name
  bool is_own = false;                      ///< all rows of the files must be of this server
  std::map<std::string, uint64_t> updates;  ///< number of updates, by table
  int server = 0;
  int servers = 1;
  bool with_states = true;
  static constexpr auto kFields = std::tuple(
      &PartSource::path, &PartSource::manifest, &PartSource::files, &PartSource::is_own,
      &PartSource::updates, &PartSource::server, &PartSource::servers, &PartSource::with_states);
};

/// Saves and loads the tables of one server, on a thread of its own. Thread-safe.
class TablePart {
 public:
  /// `agent` is null if the server is in the process of rank 0. The process is killed at system
  /// call number `fail_at` of its first save, if `fail_at` is not 0.
  explicit TablePart(rpc::Agent* agent, int64_t fail_at = 0,
                     std::shared_ptr<table::TableServer> here = {});
  ~TablePart();

  /// Returns true if this process sees the file.
  bool sees(const std::string& path) const;
  /// Begins a snapshot of the tables and returns their numbers of updates. Drops an earlier one.
  std::vector<uint64_t> hold(const std::vector<std::string>& tables);
  /// Writes the snapshot. Throws `not_finite` if a row is not finite.
  base::Future<WrittenPart> write(const PartTarget& target);
  /// Ends the snapshot. If it is being written, waits until write() has failed.
  void drop();
  /// Reads rows into the tables. Throws `bad_data` if their names, dimensions or states differ.
  base::Future<void> load(const PartSource& source);

 private:
  struct Held;
  template <class T, class F>
  base::Future<T> run(F work);
  WrittenPart write_held(Held& held, const PartTarget& target);
  void read(const PartSource& source);
  void make_system_call();

  rpc::Agent* const agent_;
  const int64_t fail_at_;
  const std::shared_ptr<table::TableServer> server_;
  std::atomic<int> saves_ = 0;
  std::atomic<int64_t> calls_ = 0;  // system calls of saves
  std::mutex mutex_;                // guards what follows
  std::shared_ptr<Held> held_;
  base::Future<void> idle_ = base::Future<void>::ready({});  // of the thread
  std::thread thread_;
  base::TimePoint told_;  // when rank 0 was last told that the save makes progress
};

/// The tables of a job, as rank 0 saves and loads them. One thread saves or loads at a time.
class TableParts {
 public:
  /// `agent` is null if the tables are in this process. `alive` is called when a save progresses.
  explicit TableParts(
      rpc::Agent* agent, std::function<void()> alive = [] {});

  /// Exposes the functions that ranks call for parts. Must be called before join(). Each rank also
  /// provides a TablePart, and rank 0 a TableParts.
  static void expose(rpc::Agent& agent);

  /// Sets the tables and the ranks that have them, or `here` if they are in this process.
  void set(std::vector<std::string> tables, std::vector<int> servers,
           const std::shared_ptr<table::TableServer>& here = {});
  bool empty() const { return tables_.empty(); }

  /// Asks all servers whether they see the file `path`. Servers that do not will send their parts.
  /// Returns their names.
  std::vector<std::string> find_remote(const std::string& path);
  /// Begins a snapshot on all servers while no trainer makes steps. Returns the content of the
  /// checkpoint's state, from which load() learns the number of parts.
  Json hold();
  /// Makes all servers write their parts.
  void begin(store::Saving& saving, int64_t step);
  /// Waits until all parts are written, and adds them and their index. Returns the longest time for
  /// which updates of a server have waited. Throws the error of a server, which names the server.
  double finish(store::Saving& saving);
  /// Ends the snapshots of all servers. On return no server writes.
  void abandon();
  /// Makes all servers load the tables of `snapshot`.
  void load(const Snapshot& snapshot, bool with_states);

  // Called by servers.
  void put(const std::string& file, uint64_t offset, const at::Tensor& bytes);
  at::Tensor get(const std::string& file, uint64_t offset, uint64_t bytes) const;
  void note_progress() { alive_(); }

 private:
  template <auto Method, class... Args>
  auto call(size_t server, const Args&... args);
  std::string name_of(size_t server) const;
  template <class T>
  T result_of(size_t server, const base::Future<T>& reply) const;

  rpc::Agent* const agent_;
  const std::function<void()> alive_;
  std::vector<std::string> tables_;
  std::vector<int> servers_;
  std::vector<bool> is_remote_;  // by server
  std::shared_ptr<TablePart> here_;
  Json held_;  // result of hold()
  std::vector<base::Future<WrittenPart>> writing_;

  mutable std::mutex mutex_;                                         // guards what follows
  std::map<std::string, std::shared_ptr<store::OutputFile>> files_;  // of remote servers
  const Snapshot* loading_ = nullptr;
};

/// Loads `tables` of `server`, which is in this process, without the state of their optimizer.
void load_tables(const Snapshot& snapshot, std::vector<std::string> tables,
                 const std::shared_ptr<table::TableServer>& server);

}  // namespace distrain::job
