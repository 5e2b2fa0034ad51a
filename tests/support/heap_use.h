#pragma once

#include <cstddef>

namespace distrain::support {

/// The heap of this thread from here on: what is taken and not given back yet counts, by whichever
/// library it is taken.
void begin_heap_use();
/// The most that was taken at a time since then.
size_t end_heap_use();

}  // namespace distrain::support
