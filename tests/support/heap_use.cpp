#include "support/heap_use.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include <malloc.h>

namespace {

struct HeapUse {
  bool counting = false;
  // Becomes negative if the thread frees memory that it allocated before begin_heap_use().
  ptrdiff_t now = 0;
  ptrdiff_t most = 0;
};

thread_local constinit HeapUse heap_use;

void taken(size_t bytes) {
  if (!heap_use.counting) return;
  heap_use.now += static_cast<ptrdiff_t>(bytes);
  heap_use.most = std::max(heap_use.most, heap_use.now);
}

void given_back(size_t bytes) {
  if (heap_use.counting) heap_use.now -= static_cast<ptrdiff_t>(bytes);
}

}  // namespace

#ifdef DISTRAIN_SANITIZED

// Uses the hooks of the sanitizer's allocator.
#include <sanitizer/allocator_interface.h>

namespace {

void install_hooks() {
  static const int installed = __sanitizer_install_malloc_and_free_hooks(
      [](const volatile void*, size_t bytes) { taken(bytes); },
      [](const volatile void* block) {
        if (block && heap_use.counting) {
          given_back(__sanitizer_get_allocated_size(const_cast<const void*>(block)));
        }
      });
  static_cast<void>(installed);
}

}  // namespace

#else

// Replaces the C library's allocation functions for all libraries of the program.
extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

void* malloc(size_t bytes) {
  void* const block = __libc_malloc(bytes);
  if (block && heap_use.counting) taken(malloc_usable_size(block));
  return block;
}

void* calloc(size_t count, size_t bytes) {
  void* const block = __libc_calloc(count, bytes);
  if (block && heap_use.counting) taken(malloc_usable_size(block));
  return block;
}

void* realloc(void* old, size_t bytes) {
  const size_t before = old && heap_use.counting ? malloc_usable_size(old) : 0;
  void* const block = __libc_realloc(old, bytes);
  if (heap_use.counting && (block || bytes == 0)) {
    given_back(before);
    if (block) taken(malloc_usable_size(block));
  }
  return block;
}

void* memalign(size_t alignment, size_t bytes) {
  void* const block = __libc_memalign(alignment, bytes);
  if (block && heap_use.counting) taken(malloc_usable_size(block));
  return block;
}

void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void** out, size_t alignment, size_t bytes) {
  void* const block = memalign(alignment, bytes);
  if (!block) return ENOMEM;
  *out = block;
  return 0;
}

void free(void* block) {
  if (block && heap_use.counting) given_back(malloc_usable_size(block));
  __libc_free(block);
}

}  // extern "C"

namespace {

void install_hooks() {}

}  // namespace

#endif

namespace distrain::support {

void begin_heap_use() {
  install_hooks();
  heap_use = {true, 0, 0};
}

size_t end_heap_use() {
  heap_use.counting = false;
  return static_cast<size_t>(heap_use.most);
}

}  // namespace distrain::support
