#include "counting_new.h"

#include <cstdlib>
#include <new>

namespace distrain::wire {

AllocationCount& allocation_count() {
  thread_local AllocationCount count;
  return count;
}

}  // namespace distrain::wire

#ifndef DISTRAIN_SANITIZED
void* operator new(size_t size) {
  auto& count = distrain::wire::allocation_count();
  if (count.counting) count.bytes += size;
  if (void* block = std::malloc(size)) return block;
  throw std::bad_alloc();
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
#endif
