// Counts the bytes that the current thread allocates by `new` while `counting` is true. Counts
// nothing under a sanitizer, which has its own operator new.
#pragma once

#include <cstddef>

namespace distrain::wire {

struct AllocationCount {
  bool counting = false;
  size_t bytes = 0;
};
AllocationCount& allocation_count();

#ifdef DISTRAIN_SANITIZED
inline constexpr bool kUnderSanitizer = true;
#else
inline constexpr bool kUnderSanitizer = false;
#endif

}  // namespace distrain::wire
