// The interface of the fuzz targets of one program. README.md says how to run them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace distrain::fuzz {

using Bytes = std::vector<uint8_t>;
using Input = std::span<const uint8_t>;

/// A fuzz target: a decoder of untrusted bytes, with valid inputs for the decoder.
struct Target {
  std::string_view name;
  /// Decodes the input. If the decoder violates a guarantee, check() aborts the program.
  void (*run)(Input);
  /// Returns valid inputs from our encoders. The fuzzer mutates them.
  std::vector<Bytes> (*seeds)();
};

std::span<const Target> targets();
/// Returns the target that the command line names. Call after LLVMFuzzerInitialize().
const Target& chosen_target();

/// Aborts the program and prints `promise` if `holds` is false.
void check(bool holds, const char* promise);

/// Aborts the program in its destructor if this thread has used more than `limit` bytes of heap
/// memory at a time. `why` explains the limit.
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

/// The memory that a decoder may use, for errors and the like, besides a multiple of its input.
inline constexpr size_t kSmall = size_t{256} << 10;

}  // namespace distrain::fuzz
