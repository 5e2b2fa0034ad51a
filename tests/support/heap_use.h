#pragma once

#include <cstddef>

namespace distrain::support {

/// Starts counting the heap memory that this thread allocates and has not freed, in any library.
void begin_heap_use();
/// Ends counting and returns the highest number of bytes in use since begin_heap_use().
size_t end_heap_use();

}  // namespace distrain::support
