#include "distrain/rows/id_groups.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "distrain/base/error.h"

namespace distrain::rows {
namespace {

constexpr int kDigitBits = 11;
constexpr size_t kDigits = size_t{1} << kDigitBits;
constexpr int kMaxPasses = 3;
constexpr size_t kSmall = 128;  // up to this size a comparison sort is faster

struct Entry {
  uint64_t hash;
  uint32_t position;
};
using Entries = std::vector<Entry>;

// Least significant digit first: each pass is stable, so equal hashes stay in the order of their
// positions.
void sort(Entries& entries, Entries& swap) {
  const size_t n = entries.size();
  const auto before = [](const Entry& a, const Entry& b) {
    return a.hash != b.hash ? a.hash < b.hash : a.position < b.position;
  };
  if (n <= kSmall) return std::sort(entries.begin(), entries.end(), before);

  const int passes = n <= (size_t{1} << 16) ? 2 : kMaxPasses;
  std::array<std::array<uint32_t, kDigits>, kMaxPasses> counts{};
  const auto digit_of = [passes](uint64_t hash, int pass) {
    return (hash >> (64 - kDigitBits * (passes - pass))) & (kDigits - 1);
  };
  for (const Entry& entry : entries) {
    for (int pass = 0; pass < passes; ++pass) ++counts[pass][digit_of(entry.hash, pass)];
  }
  swap.resize(n);
  for (int pass = 0; pass < passes; ++pass) {
    uint32_t next = 0;
    for (uint32_t& count : counts[pass]) next += std::exchange(count, next);
    for (const Entry& entry : entries) {
      swap[counts[pass][digit_of(entry.hash, pass)]++] = entry;
    }
    entries.swap(swap);
  }

  // Sorts runs that agree in the sorted bits but not in the rest.
  const int rest = 64 - kDigitBits * passes;
  for (size_t begin = 0; begin < n;) {
    size_t end = begin + 1;
    bool sorted = true;
    while (end < n && entries[end].hash >> rest == entries[begin].hash >> rest) {
      sorted = sorted && entries[end - 1].hash <= entries[end].hash;
      ++end;
    }
    if (!sorted) std::sort(entries.data() + begin, entries.data() + end, before);
    begin = end;
  }
}

}  // namespace

void IdGroups::assign(std::span<const uint64_t> ids) {
  const size_t n = ids.size();
  if (n >> 32 != 0) base::invalid("a lookup has 2^32 ids or more");
  hashes_.resize(n);
  starts_.resize(n + 1);
  positions_.resize(n);
  // Servers get distinct ids in the order of their hashes, which need no sorting.
  size_t ascending = 0;
  for (; ascending < n; ++ascending) {
    hashes_[ascending] = hash_of_id(ids[ascending]);
    if (ascending > 0 && hashes_[ascending - 1] >= hashes_[ascending]) break;
  }
  if (ascending == n) {
    ids_.assign(ids.begin(), ids.end());
    std::iota(starts_.begin(), starts_.end(), 0U);
    std::iota(positions_.begin(), positions_.end(), 0U);
    return;
  }

  thread_local Entries entries, swap;  // kept for their memory
  entries.resize(n);
  bool is_sorted = true;
  for (size_t i = 0; i < n; ++i) {
    entries[i] = {hash_of_id(ids[i]), static_cast<uint32_t>(i)};
    is_sorted = is_sorted && (i == 0 || entries[i - 1].hash <= entries[i].hash);
  }
  if (!is_sorted) sort(entries, swap);

  ids_.resize(n);
  size_t distinct = 0;
  for (size_t i = 0; i < n; ++i) {
    const Entry& entry = entries[i];
    positions_[i] = entry.position;
    if (distinct > 0 && hashes_[distinct - 1] == entry.hash) continue;
    hashes_[distinct] = entry.hash;
    ids_[distinct] = ids[entry.position];
    starts_[distinct++] = static_cast<uint32_t>(i);
  }
  ids_.resize(distinct);
  hashes_.resize(distinct);
  starts_.resize(distinct + 1);
  starts_[distinct] = static_cast<uint32_t>(n);
  constexpr size_t kKept = size_t{1} << 20;
  if (n > kKept) entries = swap = {};
}

std::vector<uint32_t> IdGroups::inverse() const {
  std::vector<uint32_t> result(total());
  for (size_t i = 0; i < size(); ++i) {
    for (const uint32_t position : positions_of(i)) result[position] = static_cast<uint32_t>(i);
  }
  return result;
}

std::vector<size_t> IdGroups::split(size_t parts) const {
  std::vector<size_t> bounds = {0};
  for (size_t part = 1; part < parts; ++part) {
    const auto target = static_cast<uint32_t>(total() * part / parts);
    auto bound = static_cast<size_t>(std::lower_bound(starts_.begin(), starts_.end(), target) -
                                     starts_.begin());
    while (bound > 0 && bound < size() &&
           stripe_of(hashes_[bound]) == stripe_of(hashes_[bound - 1])) {
      ++bound;
    }
    if (bound > bounds.back() && bound < size()) bounds.push_back(bound);
  }
  if (size() > 0) bounds.push_back(size());
  return bounds;
}

}  // namespace distrain::rows
