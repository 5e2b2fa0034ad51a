#include "distrain/rows/row_snapshot.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "distrain/base/error.h"
#include "distrain/rows/kernels.h"

namespace distrain::rows {
namespace {

// Number of rows that are saved at a time, because their stripe is locked.
constexpr uint64_t kRowsOfLock = 512;

std::vector<const char*> state_names(const RowRule& rule) {
  switch (rule.optimizer) {
    case Optimizer::kAdagrad:
      return {"sum"};
    case Optimizer::kRmsProp:
      return {"square_avg"};
    case Optimizer::kAdam:
    case Optimizer::kAdamW:
      return {"exp_avg", "exp_avg_sq"};
    case Optimizer::kSgd:
    case Optimizer::kRowwiseAdagrad:
      break;
  }
  return {};
}

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
  size_t offset = sizeof(Row) + vector;
  for (const char* name : state_names(rule)) {
    columns.push_back({name, offset, vector, dim, true});
    offset += vector;
  }
  return columns;
}

RowSnapshot::RowSnapshot(RowStore& store, size_t log_bytes)
    : store_(store),
      block_bytes_(store.block_bytes()),
      slots_(std::max<size_t>(log_bytes / block_bytes_, 1)),
      log_(new std::byte[slots_ * block_bytes_]),  // not set, so that unused pages cost nothing
      free_(slots_) {
  std::iota(free_.rbegin(), free_.rend(), 0U);
  rows_ = store_.begin_snapshot([this](uint64_t position, const Row& row) { log(position, row); });
}

RowSnapshot::~RowSnapshot() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  store_.end_snapshot();
}

void RowSnapshot::begin(const std::vector<RowColumn>& columns, const Put& put) {
  {
    const std::lock_guard lock(mutex_);
    columns_ = &columns;
    put_ = &put;
  }
  thread_ = std::thread([this] {
    try {
      empty_log();
    } catch (...) {
      stop(std::current_exception());
    }
  });
}

void RowSnapshot::stop(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    is_over_ = true;
  }
  changed_.notify_all();
}

double RowSnapshot::stalled_s() const {
  const std::lock_guard lock(mutex_);
  return stalled_s_ + (waiting_ > 0 ? base::seconds_since(waiting_since_) : 0);
}

// Copies a row to the log before it is updated. The caller has locked the row's stripe.
void RowSnapshot::log(uint64_t position, const Row& row) {
  std::unique_lock lock(mutex_);
  if (free_.empty() && !is_over_ && !put_) {
    // Nothing would end the wait if begin() cannot run because all threads of its process wait.
    error_ = std::make_exception_ptr(
        base::Exception(base::ErrorKind::kResources,
                        "updates have filled the log of a save before the save could begin"));
    is_over_ = true;
  }
  if (free_.empty() && !is_over_) {
    if (waiting_++ == 0) waiting_since_ = base::Clock::now();
    changed_.wait(lock, [this] { return !free_.empty() || is_over_; });
    if (--waiting_ == 0) stalled_s_ += base::seconds_since(waiting_since_);
  }
  if (is_over_) return;  // after an error, because otherwise all rows are written
  try {
    logged_.emplace(position, free_.back());
  } catch (...) {
    lock.unlock();
    return stop(std::current_exception());
  }
  std::memcpy(slot(free_.back()), &row, block_bytes_);
  free_.pop_back();
  if (is_nearly_full_locked()) changed_.notify_all();
}

// Writes the rows of the log whenever the log is nearly full.
void RowSnapshot::empty_log() {
  std::vector<std::byte> buffer;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return is_over_ || is_nearly_full_locked(); });
    if (is_over_) return;
    std::vector<std::pair<uint64_t, uint32_t>> taken(logged_.begin(), logged_.end());
    logged_.clear();
    lock.unlock();
    std::ranges::sort(taken);
    const size_t most = std::max<size_t>(kBufferBytes / block_bytes_, 1);
    for (size_t first = 0; first < taken.size();) {
      std::vector<const std::byte*> blocks;
      size_t end = first;
      do {
        blocks.push_back(slot(taken[end].second));
        ++end;
      } while (end < taken.size() && taken[end].first == taken[end - 1].first + 1 &&
               blocks.size() < most);
      put_rows(taken[first].first, blocks, buffer);
      lock.lock();
      for (; first < end; ++first) free_.push_back(taken[first].second);
      lock.unlock();
      changed_.notify_all();
    }
    lock.lock();
  }
}

// Takes the rows that are not in `blocks` out of the log. Rows that are in neither are written.
void RowSnapshot::take_from_log(uint64_t first, std::span<std::byte> blocks,
                                std::vector<bool>& has) {
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < has.size(); ++i) {
      if (has[i]) continue;
      const auto taken = logged_.extract(first + i);
      if (taken.empty()) continue;
      std::memcpy(blocks.data() + i * block_bytes_, slot(taken.mapped()), block_bytes_);
      free_.push_back(taken.mapped());
      has[i] = true;
    }
  }
  changed_.notify_all();
}

// Writes consecutive rows, column by column.
void RowSnapshot::put_rows(uint64_t first, std::span<const std::byte* const> blocks,
                           std::vector<std::byte>& buffer) const {
  for (const RowColumn& column : *columns_) {
    buffer.resize(blocks.size() * column.bytes);
    for (size_t i = 0; i < blocks.size(); ++i) {
      std::memcpy(buffer.data() + i * column.bytes, blocks[i] + column.offset, column.bytes);
    }
    (*put_)(column, first, buffer);
  }
}

void RowSnapshot::write() {
  try {
    write_rows();
  } catch (...) {
    stop(std::current_exception());
  }
  {
    // The thread may still write rows that it has taken from the log.
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  thread_.join();
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

// Reads the rows in the order of their positions, each from the store or from the log.
void RowSnapshot::write_rows() {
  const uint64_t most = std::max<uint64_t>(kBufferBytes / block_bytes_, 1);
  std::vector<std::byte> blocks(std::min(most, rows_) * block_bytes_), buffer;
  std::vector<const std::byte*> run;
  std::vector<bool> has;
  for (uint64_t first = 0; first < rows_; first += has.size()) {
    has.assign(std::min(most, rows_ - first), false);
    const uint64_t end = first + has.size();
    for (uint64_t begin = first; begin < end; begin += kRowsOfLock) {
      store_.save_rows(
          begin, std::min(begin + kRowsOfLock, end), [&](uint64_t position, const Row& row) {
            std::memcpy(blocks.data() + (position - first) * block_bytes_, &row, block_bytes_);
            has[position - first] = true;
          });
    }
    take_from_log(first, blocks, has);
    for (size_t i = 0; i <= has.size(); ++i) {
      if (i < has.size() && has[i]) {
        run.push_back(blocks.data() + i * block_bytes_);
      } else if (!run.empty()) {
        put_rows(first + i - run.size(), run, buffer);
        run.clear();
      }
    }
    const std::lock_guard lock(mutex_);
    if (error_) return;
  }
}

}  // namespace distrain::rows
