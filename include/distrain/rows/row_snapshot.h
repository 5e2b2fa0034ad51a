#pragma once

#include <condition_variable>
#include <exception>
#include <thread>
#include <unordered_map>

#include "distrain/base/clock.h"
#include "distrain/rows/row_store.h"
#include "distrain/rows/rule.h"

namespace distrain::rows {

/// A member of each row's block, which checkpoints store as one tensor of all rows.
struct RowColumn {
  std::string name;       ///< "ids", "weight", "updates", or a state by its name in torch.optim
  size_t offset = 0;      ///< in the block
  size_t bytes = 0;       ///< in the block
  size_t numbers = 0;     ///< `dim`, or 0 for one number in each row
  bool is_state = false;  ///< not needed for lookups
};
/// Returns the columns of a store for this rule: "ids" (uint64) first, "weight" second, then the
/// states: "updates" (uint32) and vectors or numbers of floats.
std::vector<RowColumn> row_columns(const RowStoreOptions& options, const RowRule& rule);

/// A snapshot of a store, which one thread writes while others update the store.
///
///     RowSnapshot snapshot(store);   // while no updates run
///     snapshot.begin(columns, put);
///     snapshot.write();              // on another thread; calls `put` for all rows
///
/// An update of a row that is not written yet first copies the row to a log, from which write()
/// takes it when it comes to its position. When three quarters of the log are full, a thread writes
/// the rows in it to their positions at once. If the log is full, updates wait for that thread; if
/// it is full before begin(), write() throws `resources`.
class RowSnapshot {
 public:
  static constexpr size_t kLogBytes = size_t{64} << 20;
  static constexpr size_t kBufferBytes = size_t{4} << 20;  ///< maximum of the bytes of one Put

  /// Receives a column of consecutive rows, of which the first has the position `first`. Two
  /// threads call it at a time. It must not use the store.
  using Put = std::function<void(const RowColumn& column, uint64_t first,
                                 std::span<const std::byte> bytes)>;

  /// Throws `invalid` if the store has a snapshot already.
  explicit RowSnapshot(RowStore& store, size_t log_bytes = kLogBytes);
  /// Ends the snapshot. Must not be called during write().
  ~RowSnapshot();
  RowSnapshot(const RowSnapshot&) = delete;

  uint64_t rows() const { return rows_; }
  /// Starts the thread that writes rows from the log. `columns` and `put` must outlive this object.
  void begin(const std::vector<RowColumn>& columns, const Put& put);
  /// Writes all rows that are not written yet; begin() must precede. Throws the first error of
  /// `put`, or of stop().
  void write();
  /// Makes write() fail with `error`, and ends the wait of updates. Thread-safe.
  void stop(const std::exception_ptr& error);
  /// Returns the seconds for which at least one update has waited for the log.
  double stalled_s() const;

 private:
  void log(uint64_t position, const Row& row);
  void take_from_log(uint64_t first, std::span<std::byte> blocks, std::vector<bool>& has);
  void empty_log();
  bool is_nearly_full_locked() const { return free_.empty() || free_.size() < slots_ / 4; }
  void write_rows();
  void put_rows(uint64_t first, std::span<const std::byte* const> blocks,
                std::vector<std::byte>& buffer) const;
  std::byte* slot(uint32_t number) const { return log_.get() + number * block_bytes_; }

  RowStore& store_;
  const size_t block_bytes_;
  const size_t slots_;
  const std::unique_ptr<std::byte[]> log_;
  const std::vector<RowColumn>* columns_ = nullptr;
  const Put* put_ = nullptr;  // set by begin(), with the lock of mutex_
  uint64_t rows_ = 0;
  std::thread thread_;

  mutable std::mutex mutex_;  // guards what follows; locked after a stripe's mutex
  std::condition_variable changed_;
  std::unordered_map<uint64_t, uint32_t> logged_;  // slots by position
  std::vector<uint32_t> free_;                     // slots
  std::exception_ptr error_;
  bool is_over_ = false;  // the log is not needed any more
  int waiting_ = 0;       // updates that wait for a free slot
  base::TimePoint waiting_since_;
  double stalled_s_ = 0;  // without the current wait
};

}  // namespace distrain::rows
