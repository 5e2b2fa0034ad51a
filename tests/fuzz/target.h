// What the fuzz targets of one program are to each other. README.md says how they are run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace distrain::fuzz {

using Bytes = std::vector<uint8_t>;
using Input = std::span<const uint8_t>;

/// A reader of bytes that somebody else made, and inputs that it takes.
struct Target {
  std::string_view name;
  /// Ends the program by check() when what is promised does not hold.
  void (*run)(Input);
  /// Valid inputs, by the encoders that there are: what is mutated.
  std::vector<Bytes> (*seeds)();
};

/// Those of this program.
std::span<const Target> targets();
/// The one that its command line names, from LLVMFuzzerInitialize on.
const Target& chosen_target();

/// Ends the program, saying what was promised, unless it holds.
void check(bool holds, const char* promise);

/// At most `limit` bytes of the heap are taken at a time while it lives; `why` says where the limit
/// comes from.
class MemoryLimit {
 public:
  MemoryLimit(size_t limit, const char* why);
  ~MemoryLimit();
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  const size_t limit_;
  const char* const why_;
};

/// What a decoder needs beside a multiple of its input: texts of errors, tables.
inline constexpr size_t kSmall = size_t{256} << 10;

}  // namespace distrain::fuzz
