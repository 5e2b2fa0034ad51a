#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "distrain/base/thread_pool.h"
#include "distrain/job/job.h"
#include "distrain/rows/row_snapshot.h"
#include "distrain/rpc/agent.h"
#include "distrain/store/disk.h"
#include "distrain/store/safetensors.h"
#include "distrain/table/table_server.h"

namespace distrain::job {

// Note [Tables in parts]
//
// Each server of tables writes its rows to a file of its own, `table-00001-of-00004.safetensors`,
// in the temporary folder of rank 0's save: TablePart. Rank 0 creates the files, lets all servers
// begin, adopts their files and commits the checkpoint: TableParts.
//
//   begin   While no trainer makes steps, each server takes a snapshot of its tables. A thread of
//           the server writes it while training continues.
//   load    A thread of the server reads the rows that belong to it from all parts.
//
// Rank 0 writes a random number, the nonce, to each file before a server begins. A server that does
// not find the nonce does not see rank 0's folder: it sends its pieces to rank 0 and reads pieces
// from it. Rank 0 keeps no more than these pieces in memory.
//
// If a server fails or is lost, its reply is an error, and rank 0 abandons the save. Before it
// removes the folder, it waits for the replies of all servers, so that none writes there any more.

/// The beginning of the names of the files of tables.
inline constexpr const char* kTableFiles = "table-";

/// The file to which a server writes its part of a checkpoint.
struct PartTarget {
  std::string folder;
  std::string file;
  uint64_t nonce = 0;  ///< the first bytes of the file
  int64_t step = 0;
  std::vector<std::string> tables;
  static constexpr auto kFields =
      std::tuple(&PartTarget::folder, &PartTarget::file, &PartTarget::nonce, &PartTarget::step,
                 &PartTarget::tables);
};

struct BegunPart {
  std::vector<uint64_t> updates;  ///< number of updates of each table
  uint64_t bytes = 0;             ///< size that the file will have
  static constexpr auto kFields = std::tuple(&BegunPart::updates, &BegunPart::bytes);
};

struct WrittenPart {
  store::FileSum sum;    ///< unset if rank 0 has written the file
  double stalled_s = 0;  ///< time for which updates have waited for the save
  static constexpr auto kFields = std::tuple(&WrittenPart::sum, &WrittenPart::stalled_s);
};

/// The parts of a checkpoint from which a server reads its rows.
struct PartSource {
  std::string path;                         ///< of the checkpoint, as rank 0 sees it
  uint64_t hash = 0;                        ///< LoadedCheckpoint::hash
  std::map<std::string, uint64_t> files;    ///< sizes of the parts to read, by name
  bool is_own = false;                      ///< all rows of the files must be of this server
  std::map<std::string, uint64_t> updates;  ///< number of updates, by table
  int server = 0;
  int servers = 1;
  bool with_states = true;
  static constexpr auto kFields = std::tuple(
      &PartSource::path, &PartSource::hash, &PartSource::files, &PartSource::is_own,
      &PartSource::updates, &PartSource::server, &PartSource::servers, &PartSource::with_states);
};

/// Throws `not_finite` if `piece` of the tensor `name` is not finite, so that diverged parameters
/// do not replace older checkpoints.
void check_finite(const std::string& name, const at::Tensor& piece, int64_t step);

/// Opens a part by its name.
using OpenPart = std::function<store::SafetensorsFile(const std::string& name)>;
/// Reads rows into the tables of `server`. Throws `bad_data` if their names, dimensions or states
/// differ.
void read_tables(table::TableServer& server, const PartSource& source, const OpenPart& open);

/// Computes how long the thread that saves sleeps before a system call, so that steps find a core.
class Pace {
 public:
  explicit Pace(base::TimePoint now) : resumed_(now) {}
  /// Returns the time for which the thread has worked, at most kLongest. Returns 0 if a log fills
  /// (`is_filling`), or if no row was updated for kAWhile, because then no steps are made. `logged`
  /// is the number of rows that updates have logged.
  base::Duration rest(base::TimePoint now, uint64_t logged, bool is_filling) {
    if (std::exchange(logged_, logged) != logged) updated_ = now;
    if (is_filling || now - updated_ >= kAWhile) return base::Duration::zero();
    return std::min<base::Duration>(now - resumed_, kLongest);
  }
  /// Notes that the thread resumes its work.
  void resume(base::TimePoint now) { resumed_ = now; }

  static constexpr base::Duration kLongest = std::chrono::milliseconds(20);
  static constexpr base::Duration kAWhile = std::chrono::milliseconds(100);

 private:
  base::TimePoint resumed_;
  base::TimePoint updated_{};  // when `logged_` has changed
  uint64_t logged_ = 0;
};

/// Saves and loads the tables of one server, on a thread of its own. Thread-safe.
class TablePart {
 public:
  struct Options {
    int64_t fail_at = 0;  ///< if not 0: kills the process at this system call of its first save
    bool sends = false;   ///< sends parts to rank 0 even if this process sees its folder
    std::shared_ptr<table::TableServer> server{};  ///< if null: the one of the agent
    /// Pauses the thread that saves; set by tests.
    std::function<void(base::Duration)> sleep = [](base::Duration rest) {
      std::this_thread::sleep_for(rest);
    };
  };
  /// `agent` is null if the server is in the process of rank 0.
  TablePart(rpc::Agent* agent, EventSink& sink, Options options);
  ~TablePart() { drop(); }

  /// Takes a snapshot of the tables and starts to write it. Drops an earlier one.
  BegunPart begin(const PartTarget& target);
  /// Returns the result of the save that begin() has started. Its error is `not_finite` if a row is
  /// not finite.
  base::Future<WrittenPart> written() const {
    const std::lock_guard lock(mutex_);
    return written_.shared();
  }
  /// Ends the save. No piece is written after the return.
  void drop();
  /// Calls read_tables() with the files of the checkpoint, or with pieces from rank 0.
  base::Future<void> load(const PartSource& source);

 private:
  struct Save;
  auto run(auto work);
  WrittenPart write(Save& save);
  store::SafetensorsFile open(const PartSource& source, const std::string& name) const;
  void make_system_call();
  void check_not_dropped() const {
    if (!is_dropped_) return;
    throw base::Exception(base::ErrorKind::kCancelled, "the save of the tables was abandoned");
  }

  rpc::Agent* const agent_;
  EventSink& sink_;
  const Options options_;
  const std::shared_ptr<table::TableServer> server_;
  std::atomic<int> saves_ = 0;
  std::atomic<int64_t> calls_ = 0;  // system calls of saves
  std::atomic<bool> is_dropped_ = false;
  base::TimePoint told_rank_0_;  // used only by thread_
  mutable std::mutex mutex_;     // guards what follows
  std::weak_ptr<Save> save_;     // the last one
  base::Future<WrittenPart> written_ = base::Future<WrittenPart>::ready({});
  base::SerialThread thread_;  // last, because its tasks use the other members
};

}  // namespace distrain::job
