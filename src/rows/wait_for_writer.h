#pragma once

#include <exception>
#include <optional>

#include "distrain/base/thread_state.h"

namespace distrain::rows {

/// Calls `wait`, which waits for the writer of a snapshot, or for a thread that does. Lets the pool
/// of this thread grow during the wait. If the pool cannot grow, calls `wait` all the same, because
/// the writer is not in a pool.
template <class Wait>
void wait_for_writer(const Wait& wait) {
  std::optional<base::BlockingScope> waits;
  try {
    waits.emplace();
  } catch (const std::exception&) {
  }
  wait();
}

}  // namespace distrain::rows
