#pragma once

#include <array>
#include <condition_variable>
#include <vector>

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
///     RowSnapshot snapshot(store, rule);    // while no updates run
///     while (snapshot.write_next(put)) {    // on another thread
///     }
///
/// An update of a row that is not written yet first copies the row to a log, from which
/// write_next() takes it when it comes to its position. If three quarters of the log are full,
/// write_next() and empty_log() first write the rows in it to their positions. If the log is full,
/// updates wait.
class RowSnapshot {
 public:
  static constexpr size_t kLogBytes = size_t{64} << 20;
  static constexpr size_t kPieceBytes = size_t{1} << 20;  ///< bytes of the rows of a write_next()
  /// Bytes of the log in addition to the blocks: for each row, and for each 512 rows of the store.
  static constexpr size_t kBytesOfSlot = 8, kBytesOfRegion = 4;

  /// Receives a column of consecutive rows, of which the first has the position `first`. It must
  /// not use the store.
  using Put = std::function<void(const RowColumn& column, uint64_t first,
                                 std::span<const std::byte> bytes)>;

  /// Throws `invalid` if the store has a snapshot already.
  RowSnapshot(RowStore& store, const RowRule& rule, size_t log_bytes = kLogBytes);
  /// Ends the snapshot, complete or not, and the wait of updates. Must not be called during
  /// write_next() or empty_log().
  ~RowSnapshot() {
    stop();
    store_.end_snapshot();
  }

  uint64_t rows() const { return rows_; }
  const std::vector<RowColumn>& columns() const { return columns_; }
  /// Writes the next rows that are not written yet. Returns false if all rows are written. Throws
  /// the errors of `put`. Then the snapshot must be destroyed, because updates may wait for it.
  bool write_next(const Put& put);
  /// Ends the wait of updates, and no update waits any more. The snapshot is then incomplete.
  /// Thread-safe.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
  }
  /// If the log is nearly full, writes the rows in it. The thread that calls write_next() calls
  /// this function while it does other work.
  void empty_log(const Put& put);
  /// Returns the seconds for which at least one update has waited for the log.
  double stalled_s() const {
    const std::lock_guard lock(mutex_);
    return stalled_s_ + (waiting_ > 0 ? base::seconds_since(waiting_since_) : 0);
  }
  /// Returns the number of rows that updates have copied to the log.
  uint64_t logged() const {
    const std::lock_guard lock(mutex_);
    return logged_;
  }
  /// Returns true if more than half of the log is full.
  bool is_filling() const {
    const std::lock_guard lock(mutex_);
    return uint64_t{used_} * 2 > slots_;
  }

 private:
  // The log is a pool of slots. A slot has a link and a copy of a row's block. Adjacent rows of the
  // snapshot form a region, whose slots are in one list, so that the writer can take them at once.
  struct Link {
    uint32_t next;      // slot
    uint32_t position;  // of the row in its region
  };
  static_assert(sizeof(Link) == kBytesOfSlot);
  static constexpr uint32_t kNone = ~uint32_t{0};

  void log(uint64_t position, const Row& row) noexcept;
  bool is_full_locked() const { return free_ == kNone && fresh_ == slots_ && !is_over_; }
  bool has_waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_ > 0;
  }
  void write_logged(bool may_use_store, const Put& put);
  void write_rows(uint64_t first, uint64_t end, bool from_store, const Put& put);
  void take_from_log(uint64_t region, std::byte* blocks, uint8_t* has);
  void put_rows(uint64_t first, std::span<const std::byte> blocks, std::vector<std::byte>& column,
                const Put& put) const;
  Link& link(uint32_t slot) const {
    return *reinterpret_cast<Link*>(log_.get() + slot * slot_bytes_);
  }
  std::byte* block(uint32_t slot) const { return log_.get() + slot * slot_bytes_ + sizeof(Link); }

  RowStore& store_;
  const std::vector<RowColumn> columns_;
  const size_t block_bytes_, slot_bytes_;
  const uint64_t rows_of_region_;
  const uint32_t slots_;
  const std::unique_ptr<std::byte[]> log_;
  uint64_t rows_ = 0;
  // Used only by the writer.
  struct Buffers {
    std::vector<std::byte> blocks, column;
    std::vector<uint8_t> has;  // true for each row in `blocks`
  };
  uint64_t next_ = 0;               // position
  uint64_t region_to_take_ = 0;     // by write_logged()
  std::array<Buffers, 2> buffers_;  // of write_rows(), by `from_store`, because it calls itself

  mutable std::mutex mutex_;  // guards what follows; locked after a stripe's mutex
  std::condition_variable changed_;
  std::vector<uint32_t> regions_;  // the first slot of each region's list
  uint32_t free_ = kNone;          // the first of the slots that are free again
  uint32_t fresh_ = 0;             // the first of the slots that have never been used
  uint32_t used_ = 0;              // number of slots in the lists of regions
  uint64_t logged_ = 0;            // number of rows that have been in the log
  bool is_over_ = false;           // updates need not wait
  int waiting_ = 0;                // updates that wait for a free slot
  base::TimePoint waiting_since_;
  double stalled_s_ = 0;  // without the current wait
};

}  // namespace distrain::rows
