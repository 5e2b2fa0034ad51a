#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

namespace distrain::rows {

/// Returns the hash by which an id's server and its place in a RowStore are chosen. Different ids
/// have different hashes, because every step of the function can be undone.
inline uint64_t hash_of_id(uint64_t id) {
  // The output function of SplitMix64, as in base::Random. The constant keeps 0 from hashing to 0.
  uint64_t z = id + 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

/// Rows are divided into stripes by the top bits of their hash. Each stripe has a lock.
inline constexpr int kStripeBits = 4;
inline constexpr size_t kStripes = size_t{1} << kStripeBits;
inline size_t stripe_of(uint64_t hash) { return hash >> (64 - kStripeBits); }

/// The distinct ids of a lookup or a push, and the positions at which each id occurs.
///
///     IdGroups groups;
///     groups.assign(ids);
///     for (const uint32_t position : groups.positions_of(0)) … // where groups.ids()[0] occurs
///
/// The ids are in the order of their hashes, so ids of one stripe are adjacent and accesses to a
/// stripe's index go upwards. Positions of an id are in ascending order, so sums over them do not
/// depend on anything else. An object can be assigned repeatedly and then reuses its memory.
class IdGroups {
 public:
  IdGroups() = default;
  explicit IdGroups(std::pmr::memory_resource* memory)
      : ids_(memory), hashes_(memory), starts_(1, memory), positions_(memory) {}
  explicit IdGroups(std::span<const uint64_t> ids) { assign(ids); }

  /// Groups `ids`. If they are not in the order of their hashes, sorts them: for more than 128 ids
  /// by a radix sort of 22 bits of the hash (33 bits for more than 2^16 ids), then a comparison
  /// sort of the few ids that agree in those bits. Throws `invalid` for 2^32 ids or more.
  void assign(std::span<const uint64_t> ids);

  size_t size() const { return ids_.size(); }             ///< distinct ids
  size_t total() const { return positions_.size(); }      ///< ids, repeated ones counted
  std::span<const uint64_t> ids() const { return ids_; }  ///< each id once
  std::span<const uint64_t> hashes() const { return hashes_; }
  /// Positions of the i-th id are positions()[starts()[i]] to positions()[starts()[i + 1] - 1].
  std::span<const uint32_t> starts() const { return starts_; }
  std::span<const uint32_t> positions() const { return positions_; }
  std::span<const uint32_t> positions_of(size_t i) const {
    return std::span(positions_).subspan(starts_[i], starts_[i + 1] - starts_[i]);
  }
  /// Returns for each position the number of its id among ids().
  std::vector<uint32_t> inverse() const;

  /// Divides the distinct ids into at most `parts` ranges for threads: the i-th is [result[i],
  /// result[i + 1]). Ranges have similar numbers of positions and share no stripe, so threads do
  /// not wait for each other's locks.
  std::vector<size_t> split(size_t parts) const;

 private:
  std::pmr::vector<uint64_t> ids_;
  std::pmr::vector<uint64_t> hashes_;
  std::pmr::vector<uint32_t> starts_{0};
  std::pmr::vector<uint32_t> positions_;
};

}  // namespace distrain::rows
