#include "distrain/rows/row_snapshot.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace distrain::rows {
namespace {

// Maximum number of rows in a region. A region is copied under the lock of its stripe.
constexpr uint64_t kRowsOfRegion = 512;
// If fewer rows of a region are in the log, empty_log() writes only these.
constexpr size_t kDenseRows = 16;

}  // namespace

std::vector<RowColumn> row_columns(const RowStoreOptions& options, const RowRule& rule) {
  const size_t dim = options.dim, vector = dim * sizeof(float);
  std::vector<RowColumn> columns = {
      {"ids", offsetof(Row, id), sizeof(Row::id)},
      {"weight", sizeof(Row), vector, dim},
      {"updates", offsetof(Row, updates), sizeof(Row::updates), 0, /*is_state=*/true}};
  if (rule.optimizer == Optimizer::kRowwiseAdagrad) {
    columns.push_back({"sum", offsetof(Row, row_state), sizeof(Row::row_state), 0, true});
  }
  const bool is_adam = options.state_floats == 2 * dim;
  const char* const first = is_adam                                 ? "exp_avg"
                            : rule.optimizer == Optimizer::kRmsProp ? "square_avg"
                                                                    : "sum";
  if (options.state_floats > 0) columns.push_back({first, sizeof(Row) + vector, vector, dim, true});
  if (is_adam) columns.push_back({"exp_avg_sq", sizeof(Row) + 2 * vector, vector, dim, true});
  return columns;
}

RowSnapshot::RowSnapshot(RowStore& store, const RowRule& rule, size_t log_bytes)
    : store_(store),
      columns_(row_columns(store.options(), rule)),
      block_bytes_(store.block_bytes()),
      slot_bytes_(sizeof(Link) + block_bytes_),
      rows_of_region_(std::clamp<uint64_t>(kPieceBytes / block_bytes_, 1, kRowsOfRegion)),
      slots_([&] {
        const size_t regions = (store.rows() / rows_of_region_ + 1) * kBytesOfRegion;
        return static_cast<uint32_t>(
            std::max<size_t>((log_bytes - std::min(log_bytes, regions)) / slot_bytes_, 1));
      }()),
      log_(new std::byte[slots_ * slot_bytes_]) {  // not set, so that unused pages cost nothing
  regions_.assign(store.rows() / rows_of_region_ + 1, kNone);
  rows_ = store_.begin_snapshot([this](uint64_t position, const Row& row) { log(position, row); });
  try {
    const std::lock_guard lock(mutex_);
    regions_.resize(std::max<size_t>(regions_.size(), rows_ / rows_of_region_ + 1), kNone);
  } catch (...) {  // no destructor runs
    stop();
    store_.end_snapshot();
    throw;
  }
}

// Copies a row to the log before it is updated. The caller has locked the row's stripe.
void RowSnapshot::log(uint64_t position, const Row& row) noexcept {
  std::unique_lock lock(mutex_);
  if (is_full_locked()) {
    RowStore::wait_for_saver([&] {
      if (waiting_++ == 0) waiting_since_ = base::Clock::now();
      changed_.wait(lock, [this] { return !is_full_locked(); });
      if (--waiting_ == 0) stalled_s_ += base::seconds_since(waiting_since_);
    });
  }
  if (is_over_) return;
  const uint32_t slot = free_ != kNone ? std::exchange(free_, link(free_).next) : fresh_++;
  const uint64_t region = position / rows_of_region_;
  // Rows may have been created between the reading of rows() and the beginning of the snapshot.
  if (region >= regions_.size()) regions_.resize(region + 1, kNone);
  link(slot) = {std::exchange(regions_[region], slot),
                static_cast<uint32_t>(position % rows_of_region_)};
  ++used_;
  ++logged_;
  std::memcpy(block(slot), &row, block_bytes_);
}

void RowSnapshot::empty_log(const Put& put) {
  const auto is_nearly_full = [this] {
    const std::lock_guard lock(mutex_);
    return uint64_t{used_} * 4 >= uint64_t{slots_} * 3;
  };
  while (is_nearly_full()) write_logged(/*may_use_store=*/true, put);
}

// Writes the logged rows of the next region that has any. If these are not few and the function
// `may_use_store`, also writes the other rows of the region, because fewer and larger puts are
// faster.
void RowSnapshot::write_logged(bool may_use_store, const Put& put) {
  size_t logged = 0;
  {
    const std::lock_guard lock(mutex_);
    for (size_t left = regions_.size(); left > 0 && logged == 0; --left) {
      region_to_take_ = (region_to_take_ + 1) % regions_.size();
      uint32_t slot = regions_[region_to_take_];
      for (; slot != kNone && logged < kDenseRows; slot = link(slot).next) ++logged;
    }
  }
  if (logged == 0) return;
  const uint64_t first = region_to_take_ * rows_of_region_;
  write_rows(first, std::min(first + rows_of_region_, rows_), may_use_store && logged >= kDenseRows,
             put);
}

bool RowSnapshot::write_next(const Put& put) {
  empty_log(put);
  const uint64_t most =
      std::max<uint64_t>(kPieceBytes / (rows_of_region_ * block_bytes_), 1) * rows_of_region_;
  const uint64_t first = std::exchange(next_, std::min(next_ + most, rows_));
  write_rows(first, next_, /*from_store=*/true, put);
  return next_ < rows_;
}

// Takes the rows of a region out of the log.
void RowSnapshot::take_from_log(uint64_t region, std::byte* blocks, uint8_t* has) {
  uint32_t first, last = kNone, count = 0;
  {
    const std::lock_guard lock(mutex_);
    first = std::exchange(regions_[region], kNone);
  }
  for (uint32_t slot = first; slot != kNone; slot = link(slot).next, ++count) {
    std::memcpy(blocks + link(slot).position * block_bytes_, block(slot), block_bytes_);
    has[link(slot).position] = true;
    last = slot;
  }
  if (count == 0) return;
  {
    const std::lock_guard lock(mutex_);
    link(last).next = std::exchange(free_, first);
    used_ -= count;
  }
  changed_.notify_all();
}

// Writes the rows `first` to `end` - 1, each from the store or from the log. `first` begins a
// region. Rows that are in neither are written already.
void RowSnapshot::write_rows(uint64_t first, uint64_t end, bool from_store, const Put& put) {
  Buffers& buffers = buffers_[from_store];
  buffers.blocks.resize((end - first) * block_bytes_);
  buffers.has.assign(end - first, false);
  const auto save = [&](uint64_t position, const Row& row) {
    std::memcpy(buffers.blocks.data() + (position - first) * block_bytes_, &row, block_bytes_);
    buffers.has[position - first] = true;
  };
  for (uint64_t begin = first; begin < end; begin += rows_of_region_) {
    while (from_store && !store_.save_rows(begin, std::min(begin + rows_of_region_, end), save)) {
      // An update that waits for the log may have locked the stripe.
      if (has_waiting()) write_logged(/*may_use_store=*/false, put);
      std::this_thread::yield();
    }
    take_from_log(begin / rows_of_region_, buffers.blocks.data() + (begin - first) * block_bytes_,
                  buffers.has.data() + (begin - first));
  }
  const std::span<const std::byte> blocks = buffers.blocks;
  for (uint64_t begin = 0, all = end - first; begin < all;) {
    uint64_t next = begin;
    while (next < all && buffers.has[next] != 0) ++next;
    put_rows(first + begin, blocks.subspan(begin * block_bytes_, (next - begin) * block_bytes_),
             buffers.column, put);
    begin = next + 1;
  }
}

// Writes consecutive rows, column by column.
void RowSnapshot::put_rows(uint64_t first, std::span<const std::byte> blocks,
                           std::vector<std::byte>& column, const Put& put) const {
  const size_t count = blocks.size() / block_bytes_;
  if (count == 0) return;
  for (const RowColumn& each : columns_) {
    column.resize(count * each.bytes);
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(column.data() + i * each.bytes, blocks.data() + i * block_bytes_ + each.offset,
                  each.bytes);
    }
    put(each, first, column);
  }
}

}  // namespace distrain::rows
