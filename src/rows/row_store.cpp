#include "distrain/rows/row_store.h"

#include <bit>
#include <cmath>
#include <new>
#include <numbers>
#include <optional>
#include <string>
#include <utility>

#include <sys/mman.h>

#include "distrain/base/error.h"
#include "distrain/base/random.h"
#include "distrain/base/thread_state.h"

namespace distrain::rows {
namespace {

constexpr int kTagBits = 7;
constexpr uint32_t kMaxRowsOfStripe = (uint32_t{1} << (32 - kTagBits)) - 1;
constexpr int kFirstIndexBits = 5;
constexpr size_t kSegmentBytes = size_t{32} << 10;
constexpr size_t kChunkBytes = size_t{2} << 20;  // a huge page
// Number of ids that are looked up together, so that their cache misses overlap.
constexpr size_t kLookupBatch = 32;

// Returns the hash bits that a slot holds. The bits that choose a stripe or a slot would tell
// nothing new, and the low bits may be equal for all ids of one server.
uint32_t tag_of(uint64_t hash) { return (hash >> 12) & ((1U << kTagBits) - 1); }

[[noreturn]] void no_resources(std::string message) {
  throw base::Exception(base::ErrorKind::kResources, std::move(message));
}

size_t block_bytes_of(const RowStoreOptions& options) {
  if (options.dim == 0) base::invalid("a row must have at least one value");
  const size_t bytes = sizeof(Row) + (options.dim + options.state_floats) * sizeof(float);
  return (bytes + alignof(Row) - 1) / alignof(Row) * alignof(Row);
}

// Maps memory that begins at a multiple of kChunkBytes. malloc would put its own header into a huge
// page beside each chunk.
std::byte* map_chunk(size_t bytes) {
  void* mapped = mmap(nullptr, bytes + kChunkBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const first = static_cast<std::byte*>(mapped);
  const size_t skipped =
      (kChunkBytes - reinterpret_cast<uintptr_t>(first) % kChunkBytes) % kChunkBytes;
  std::byte* const chunk = first + skipped;
  if (skipped > 0) munmap(first, skipped);
  if (skipped < kChunkBytes) munmap(chunk + bytes, kChunkBytes - skipped);
  // Random accesses to rows in small pages would spend most of their time in page table walks.
  // Without huge pages the store only is slower, so the result does not matter.
  madvise(chunk, bytes, MADV_HUGEPAGE);
  return chunk;
}

}  // namespace

InitialValue keyed_uniform(uint64_t seed, float bound) {
  return [seed, bound](uint64_t id, std::span<float> value) {
    base::Random random({seed, id});
    for (float& x : value) x = static_cast<float>(bound * (2 * random.unit() - 1));
  };
}

InitialValue keyed_normal(uint64_t seed, float standard_deviation) {
  return [seed, standard_deviation](uint64_t id, std::span<float> value) {
    base::Random random({seed, id});
    // Computed in double precision, so that libraries that round differently agree in the floats.
    for (size_t i = 0; i < value.size(); i += 2) {
      const double radius = standard_deviation * std::sqrt(-2 * std::log(1 - random.unit()));
      const double angle = 2 * std::numbers::pi * random.unit();
      value[i] = static_cast<float>(radius * std::cos(angle));
      if (i + 1 < value.size()) value[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
  };
}

RowStore::RowStore(RowStoreOptions options)
    : options_(std::move(options)),
      block_bytes_(block_bytes_of(options_)),
      segment_shift_(
          static_cast<int>(std::bit_width(std::max<size_t>(kSegmentBytes / block_bytes_, 1))) - 1),
      segment_mask_((uint32_t{1} << segment_shift_) - 1),
      chunk_bytes_(kChunkBytes) {
  const size_t segment = block_bytes_ << segment_shift_;
  if (segment > kChunkBytes) chunk_bytes_ = (segment + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  chunk_used_ = chunk_bytes_;
}

RowStore::~RowStore() {
  for (std::byte* chunk : chunks_) munmap(chunk, chunk_bytes_);
}

// Polls before it blocks, because a stripe is usually locked for some microseconds. But its holder
// may wait in `on_overwrite`.
void RowStore::StripeLocks::wait_for(std::mutex& mutex) {
  if (base::thread_state().poll.poll([&mutex] { return mutex.try_lock(); })) return;
  wait_for_saver([&mutex] { mutex.lock(); });
}

void RowStore::wait_for_saver(const std::function<void()>& wait) {
  std::optional<base::BlockingScope> waits;
  try {
    waits.emplace();
  } catch (const std::exception&) {
  }
  wait();
}

uint64_t RowStore::memory_bytes() const {
  uint64_t bytes = sizeof *this;
  for (const Stripe& stripe : stripes_) {
    const std::lock_guard lock(stripe.mutex);
    bytes += stripe.index.capacity() * sizeof stripe.index[0] +
             stripe.segments.capacity() * sizeof stripe.segments[0] +
             stripe.saved.capacity() * sizeof stripe.saved[0];
  }
  const std::lock_guard lock(chunks_mutex_);
  return bytes + chunks_.size() * chunk_bytes_;
}

std::byte* RowStore::allocate_segment() {
  const size_t segment = block_bytes_ << segment_shift_;
  const std::lock_guard lock(chunks_mutex_);
  if (chunk_used_ + segment > chunk_bytes_) {
    chunks_.reserve(chunks_.size() + 1);
    chunks_.push_back(map_chunk(chunk_bytes_));
    chunk_used_ = 0;
  }
  return chunks_.back() + std::exchange(chunk_used_, chunk_used_ + segment);
}

RowNumber RowStore::find_locked(const Stripe& stripe, uint64_t id, uint64_t hash) const {
  if (stripe.index.empty()) return kNoRow;
  const size_t mask = stripe.index.size() - 1;
  for (size_t i = home_of(stripe, hash);; i = (i + 1) & mask) {
    const uint32_t slot = stripe.index[i];
    if (slot == 0) return kNoRow;
    if ((slot & ((1U << kTagBits) - 1)) != tag_of(hash)) continue;
    const RowNumber number = (slot >> kTagBits) - 1;
    if (row(stripe, number)->id == id) return number;
  }
}

void RowStore::grow_index_locked(Stripe& stripe) {
  const int bits = stripe.index.empty() ? kFirstIndexBits : stripe.index_bits + 1;
  std::vector<uint32_t> index(size_t{1} << bits);
  const size_t mask = index.size() - 1;
  for (RowNumber number = 0; number < stripe.rows; ++number) {
    const uint64_t hash = hash_of_id(row(stripe, number)->id);
    size_t i = (hash << kStripeBits) >> (64 - bits);
    while (index[i] != 0) i = (i + 1) & mask;
    index[i] = (number + 1) << kTagBits | tag_of(hash);
  }
  stripe.index = std::move(index);
  stripe.index_bits = bits;
}

// Appends the row to its stripe. The row enters the index last, so that an exception leaves no
// trace of it. Not inlined, because that would slow the loop of read() down.
[[gnu::noinline]] RowNumber RowStore::create_locked(Stripe& stripe, uint64_t id, uint64_t hash,
                                                    const std::function<void(Row&)>& fill) {
  if (stripe.rows == kMaxRowsOfStripe) {
    no_resources("a table has too many rows for one server: use more servers");
  }
  const uint64_t before = rows_.fetch_add(1, std::memory_order_relaxed);
  try {
    if (options_.max_rows != 0 && before >= options_.max_rows) {
      no_resources("a table would exceed its limit of " + std::to_string(options_.max_rows) +
                   " rows on a server: raise the limit or use more servers");
    }
    if (uint64_t{stripe.rows} * 10 >= stripe.index.size() * 7) grow_index_locked(stripe);
    const RowNumber number = stripe.rows;
    if (number >> segment_shift_ == stripe.segments.size()) {
      stripe.segments.reserve(std::bit_ceil(stripe.segments.size() + 1));
      stripe.segments.push_back(allocate_segment());
    }
    Row& created = *row(stripe, number);
    created.id = id;
    if (fill) {
      fill(created);
    } else {
      created.updates = 0;
      created.row_state = options_.initial_state;
      options_.initial_value(id, {created.value(), options_.dim});
      std::fill_n(created.value() + options_.dim, options_.state_floats, options_.initial_state);
    }
    const size_t mask = stripe.index.size() - 1;
    size_t i = home_of(stripe, hash);
    while (stripe.index[i] != 0) i = (i + 1) & mask;
    stripe.index[i] = (number + 1) << kTagBits | tag_of(hash);
    ++stripe.rows;
    return number;
  } catch (const std::bad_alloc&) {
    rows_.fetch_sub(1, std::memory_order_relaxed);
    no_resources("there is no memory for another row of a table, which has " +
                 std::to_string(before) + " rows on this server");
  } catch (...) {
    rows_.fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
}

// Looks ids up in batches. For each batch, three passes make the cache misses of its ids overlap:
// prefetch the slots, then prefetch the rows that the slots name, then compare. If `values` is not
// null, copies the values, too.
void RowStore::read(const IdGroups& groups, std::span<RowNumber> numbers, bool creates,
                    float* values, size_t first, size_t last) {
  const std::span<const uint64_t> ids = groups.ids();
  const std::span<const uint64_t> hashes = groups.hashes();
  const size_t dim = options_.dim;
  const size_t needed_bytes = sizeof(Row) + (values ? dim * sizeof(float) : 0);
  const auto stripe_at = [&](size_t i) -> Stripe& { return stripes_[stripe_of(hashes[i])]; };
  for (size_t begin = first; begin < last;) {
    const size_t end_of_ids = end_of_range(hashes, begin, last);
    const StripeLocks locks(*this, stripe_of(hashes[begin]), stripe_of(hashes[end_of_ids - 1]));
    while (begin < end_of_ids) {
      const size_t end = std::min(begin + kLookupBatch, end_of_ids);
      for (size_t i = begin; i < end; ++i) {
        const Stripe& stripe = stripe_at(i);
        if (!stripe.index.empty()) __builtin_prefetch(&stripe.index[home_of(stripe, hashes[i])]);
      }
      for (size_t i = begin; i < end; ++i) {
        const Stripe& stripe = stripe_at(i);
        const uint32_t slot = stripe.index.empty() ? 0 : stripe.index[home_of(stripe, hashes[i])];
        if (slot == 0) continue;
        const auto* its_row = reinterpret_cast<const char*>(row(stripe, (slot >> kTagBits) - 1));
        for (size_t at = 0; at < needed_bytes; at += 64) __builtin_prefetch(its_row + at);
        __builtin_prefetch(its_row + needed_bytes - 1);
      }
      for (size_t i = begin; i < end; ++i) {
        Stripe& stripe = stripe_at(i);
        numbers[i] = find_locked(stripe, ids[i], hashes[i]);
        if (creates && numbers[i] == kNoRow) [[unlikely]] {
          numbers[i] = create_locked(stripe, ids[i], hashes[i], nullptr);
        }
        if (!values) continue;
        if (numbers[i] == kNoRow) {
          options_.initial_value(ids[i], {values + i * dim, dim});
        } else {
          std::copy_n(row(stripe, numbers[i])->value(), dim, values + i * dim);
        }
      }
      begin = end;
    }
  }
}

void RowStore::restore(uint64_t id, const std::function<void(Row&)>& fill) {
  const uint64_t hash = hash_of_id(id);
  Stripe& stripe = stripes_[stripe_of(hash)];
  const std::lock_guard lock(stripe.mutex);
  if (find_locked(stripe, id, hash) != kNoRow) {
    base::bad_data("a table has two rows with the id " + std::to_string(id));
  }
  create_locked(stripe, id, hash, fill);
}

uint64_t RowStore::begin_snapshot(RowSink on_overwrite) {
  const std::lock_guard lock(snapshot_mutex_);
  if (on_overwrite_) base::invalid("a table already has a snapshot");
  on_overwrite_ = std::move(on_overwrite);
  uint64_t position = 0;
  try {
    for (Stripe& stripe : stripes_) {
      const std::lock_guard stripe_lock(stripe.mutex);
      stripe.saved.assign((stripe.rows + 63) / 64, 0);
      stripe.first_position = position;
      stripe.snapshot_rows = stripe.rows;
      position += stripe.rows;
    }
  } catch (const std::bad_alloc&) {
    end_snapshot_locked();
    no_resources("there is no memory for the snapshot of a table");
  }
  return position;
}

bool RowStore::save_rows(uint64_t first, uint64_t last, const RowSink& sink) {
  for (Stripe& stripe : stripes_) {
    const uint64_t begin = std::max(first, stripe.first_position);
    const uint64_t end = std::min(last, stripe.first_position + stripe.snapshot_rows);
    if (begin >= end) continue;
    const std::unique_lock lock(stripe.mutex, std::try_to_lock);
    if (!lock) return false;
    for (uint64_t position = begin; position < end; ++position) {
      const auto number = static_cast<RowNumber>(position - stripe.first_position);
      if (mark_saved(stripe, number)) sink(position, *row(stripe, number));
    }
  }
  return true;
}

void RowStore::end_snapshot_locked() {
  for (Stripe& stripe : stripes_) {
    const std::lock_guard lock(stripe.mutex);
    stripe.saved = {};
    stripe.snapshot_rows = 0;
    stripe.first_position = 0;
  }
  on_overwrite_ = nullptr;
}

}  // namespace distrain::rows
