#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "distrain/rows/id_groups.h"

namespace distrain::rows {

/// The header of a row's block. The block goes on with the value (dim floats) and the optimizer's
/// state (state_floats floats).
struct alignas(16) Row {
  uint64_t id;
  uint32_t updates;  ///< number of updates of this row
  float row_state;   ///< state that an optimizer keeps once for the whole row

  float* value() { return reinterpret_cast<float*>(this + 1); }
  const float* value() const { return reinterpret_cast<const float*>(this + 1); }
};
static_assert(sizeof(Row) == 16);

/// Writes the initial value of the row `id`. Threads may call it at the same time. It must not use
/// the store.
using InitialValue = std::function<void(uint64_t id, std::span<float> value)>;

/// Return initial values that depend only on `seed` and the id: uniform in [-bound, bound], or
/// normal with mean 0 (Box and Muller 1958).
InitialValue keyed_uniform(uint64_t seed, float bound);
InitialValue keyed_normal(uint64_t seed, float standard_deviation);

struct RowStoreOptions {
  size_t dim = 0;           ///< floats of a value
  size_t state_floats = 0;  ///< floats of optimizer state after the value
  float initial_state = 0;  ///< of each of the state's floats, and of Row::row_state
  uint64_t max_rows = 0;    ///< if not 0, the maximum; a stripe has at most 2^25 - 1 rows
  /// Must not be null.
  InitialValue initial_value = [](uint64_t, std::span<float> value) {
    std::ranges::fill(value, 0.0F);
  };
};

/// The number of a row in its stripe, in the order of creation. A row keeps its number.
using RowNumber = uint32_t;
inline constexpr RowNumber kNoRow = ~RowNumber{0};

/// Rows of floats by 64-bit id, with the state of their optimizer.
///
///     RowStore store({.dim = 32, .initial_value = keyed_normal(seed, 0.01f)});
///     const IdGroups groups(ids);
///     std::vector<RowNumber> numbers(groups.size());
///     store.read(groups, numbers, /*creates=*/true, values, 0, groups.size());
///     // then update_rows() of kernels.h
///
/// The top bits of an id's hash choose one of 16 stripes. A stripe has a lock, an index and its
/// rows. The index is a hash table with linear probing whose slots have 4 bytes: 25 bits of row
/// number and 7 bits of hash. The index doubles when it is 70 % full. Rows lie in segments
/// of about 32 KiB, cut from chunks of 2 MiB, and never move. So a row needs its block and 6 to
/// 12 bytes of index, and growth copies no rows.
///
/// Thread-safe. Rows are never removed.
class RowStore {
 public:
  explicit RowStore(RowStoreOptions options);
  ~RowStore();

  const RowStoreOptions& options() const { return options_; }
  /// Returns the bytes of a row's block: the header, the value, the state, and padding to 16 bytes.
  size_t block_bytes() const { return block_bytes_; }
  uint64_t rows() const { return rows_.load(std::memory_order_relaxed); }
  /// Returns the bytes that the store has allocated.
  uint64_t memory_bytes() const;

  /// Writes the row number of the i-th id of `groups` to numbers[i]: kNoRow for an id without a
  /// row.
  void find(const IdGroups& groups, std::span<RowNumber> numbers) {
    read(groups, numbers, /*creates=*/false, nullptr, 0, groups.size());
  }
  /// Writes the row numbers of the ids `first` to `last` - 1 as find() does. If `creates`, creates
  /// missing rows before; throws `resources` if a row would exceed max_rows or there is no memory;
  /// rows created until then stay. Unless `values` is null, copies the value of the i-th id to
  /// `values` + i * dim: the initial value if there is no row.
  void read(const IdGroups& groups, std::span<RowNumber> numbers, bool creates, float* values,
            size_t first, size_t last);
  /// Creates the row `id` from a checkpoint: `fill` sets everything except the id, and is called
  /// before other threads can see the row. Throws `bad_data` if the row exists, otherwise as
  /// read().
  void restore(uint64_t id, const std::function<void(Row&)>& fill);

  // Note [Snapshot of a row store]
  //
  // A snapshot is the rows at the time of begin_snapshot(), in the order of stripes and row
  // numbers. Its saver reads them by save_rows(), while training continues. Each row of the
  // snapshot has a bit that says whether it is saved. Before the first update of a row that is not
  // saved, the updating thread passes the row to `on_overwrite` and sets the bit. So each row of
  // the snapshot is passed exactly once, to save_rows() or to `on_overwrite`, with the value that
  // it had at the beginning.

  /// Receives a row and its position in the snapshot. The caller holds the lock of the row's
  /// stripe, so the function must not use the store, must not wait for a thread that does, and must
  /// not throw.
  using RowSink = std::function<void(uint64_t position, const Row& row)>;

  /// Begins a snapshot and returns its number of rows. Updates may call `on_overwrite` before the
  /// return. The snapshot may lack or contain an update
  /// that runs concurrently, because the stripes are prepared one after the other; without such
  /// updates the snapshot is consistent. Throws `invalid` if there is a snapshot already.
  uint64_t begin_snapshot(RowSink on_overwrite);
  /// Passes the rows at the positions `first` to `last` - 1 that are not saved yet to `sink`. Holds
  /// a stripe's lock for the rows of one call, so a few hundred rows a call keep updates waiting
  /// only shortly. Returns false if another thread holds the lock of a stripe, so that the caller
  /// can let that thread go on before it calls again: the thread may wait in `on_overwrite`.
  bool save_rows(uint64_t first, uint64_t last, const RowSink& sink);
  /// Ends the snapshot, complete or not. `on_overwrite` is not called after the return.
  void end_snapshot() {
    const std::lock_guard lock(snapshot_mutex_);
    end_snapshot_locked();
  }

  /// Calls `wait`, which waits for the thread that saves, or for a thread that does. Lets the pool
  /// of this thread grow during the wait. If the pool cannot grow, calls `wait` all the same,
  /// because the thread that saves is not in a pool.
  static void wait_for_saver(const std::function<void()>& wait);

  class LockedRows;
  /// Calls `f(LockedRows&, begin, end)` for adjacent ranges of the ids `first` to `last` - 1 of
  /// `groups`, whose row numbers are in `numbers`. A range has at least 64 ids, if there are so
  /// many, so that cache misses of its rows can overlap.
  template <class F>
  void for_each_range(const IdGroups& groups, std::span<const RowNumber> numbers, size_t first,
                      size_t last, F f);

 private:
  class StripeLocks;
  struct alignas(64) Stripe {
    mutable std::mutex mutex;
    uint32_t rows = 0;
    int index_bits = 0;           // the index has 2^index_bits slots, or none
    std::vector<uint32_t> index;  // row number + 1 above 7 bits of hash; 0: an empty slot
    std::vector<std::byte*> segments;
    // The snapshot's rows of this stripe; `saved` is empty if there is no snapshot.
    std::vector<uint64_t> saved;
    uint32_t snapshot_rows = 0;
    uint64_t first_position = 0;
  };

  Row* row(const Stripe& stripe, RowNumber number) const {
    return reinterpret_cast<Row*>(stripe.segments[number >> segment_shift_] +
                                  (number & segment_mask_) * block_bytes_);
  }
  static size_t home_of(const Stripe& stripe, uint64_t hash) {
    return (hash << kStripeBits) >> (64 - stripe.index_bits);
  }
  RowNumber find_locked(const Stripe& stripe, uint64_t id, uint64_t hash) const;
  RowNumber create_locked(Stripe& stripe, uint64_t id, uint64_t hash,
                          const std::function<void(Row&)>& fill);
  void grow_index_locked(Stripe& stripe);
  std::byte* allocate_segment();
  void end_snapshot_locked();
  static bool mark_saved(Stripe& stripe, RowNumber number) {
    uint64_t& word = stripe.saved[number / 64];
    const uint64_t bit = uint64_t{1} << (number % 64);
    const bool was_saved = (word & bit) != 0;
    word |= bit;
    return !was_saved;
  }

  const RowStoreOptions options_;
  const size_t block_bytes_;
  const int segment_shift_;  // a segment has 2^segment_shift_ rows
  const uint32_t segment_mask_;
  std::atomic<uint64_t> rows_{0};
  std::array<Stripe, kStripes> stripes_;
  // Guards the beginning and the end of a snapshot; locked before a stripe's mutex.
  std::mutex snapshot_mutex_;
  RowSink on_overwrite_;  // changes only while no stripe has `saved` bits

  mutable std::mutex chunks_mutex_;  // locked after a stripe's mutex
  std::vector<std::byte*> chunks_;
  size_t chunk_bytes_;
  size_t chunk_used_;  // bytes of the last chunk that segments occupy
};

/// Holds the locks of adjacent stripes. Locks them in ascending order, so threads do not deadlock.
class RowStore::StripeLocks {
 public:
  StripeLocks(const RowStore& store, size_t first, size_t last)
      : store_(store), first_(first), last_(last) {
    for (size_t i = first_; i <= last_; ++i) {
      std::mutex& mutex = store_.stripes_[i].mutex;
      if (!mutex.try_lock()) wait_for(mutex);
    }
  }
  ~StripeLocks() {
    for (size_t i = first_; i <= last_; ++i) store_.stripes_[i].mutex.unlock();
  }
  StripeLocks(const StripeLocks&) = delete;

 private:
  static void wait_for(std::mutex& mutex);

  const RowStore& store_;
  const size_t first_, last_;
};

/// The rows of the ids of an IdGroups, some of which are locked.
class RowStore::LockedRows {
 public:
  /// Returns the row of the i-th id, which must be in the range of for_each_range().
  Row& operator[](size_t i) { return *store_.row(stripe(i), numbers_[i]); }
  /// Must be called before each update of a row: passes the row to the snapshot that needs it.
  void before_update(size_t i) {
    Stripe& its = stripe(i);
    if (its.saved.empty() || numbers_[i] >= its.snapshot_rows || !mark_saved(its, numbers_[i])) {
      return;
    }
    store_.on_overwrite_(its.first_position + numbers_[i], (*this)[i]);
  }

 private:
  friend class RowStore;
  LockedRows(RowStore& store, std::span<const uint64_t> hashes, std::span<const RowNumber> numbers)
      : store_(store), hashes_(hashes), numbers_(numbers) {}
  Stripe& stripe(size_t i) { return store_.stripes_[stripe_of(hashes_[i])]; }

  RowStore& store_;
  const std::span<const uint64_t> hashes_;
  const std::span<const RowNumber> numbers_;
};

/// Returns the end of a range of ids that begins at `begin` and has all its ids of its stripes: at
/// least 64 ids or up to `last`.
inline size_t end_of_range(std::span<const uint64_t> hashes, size_t begin, size_t last) {
  constexpr size_t kLeast = 64;
  size_t end = begin + 1;
  while (end < last &&
         (end - begin < kLeast || stripe_of(hashes[end]) == stripe_of(hashes[end - 1]))) {
    ++end;
  }
  return end;
}

template <class F>
void RowStore::for_each_range(const IdGroups& groups, std::span<const RowNumber> numbers,
                              size_t first, size_t last, F f) {
  const std::span<const uint64_t> hashes = groups.hashes();
  LockedRows rows(*this, hashes, numbers);
  for (size_t begin = first; begin < last;) {
    const size_t end = end_of_range(hashes, begin, last);
    const StripeLocks locks(*this, stripe_of(hashes[begin]), stripe_of(hashes[end - 1]));
    f(rows, begin, end);
    begin = end;
  }
}

}  // namespace distrain::rows
