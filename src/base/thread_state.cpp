#include "distrain/base/thread_state.h"

#include <cstdio>
#include <cstdlib>

namespace distrain::base {

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

void check_may_wait(const char* what) {
  if (!thread_state().must_not_wait) return;
  std::fprintf(stderr, "distrain: fatal: %s on the loop thread, where it could never end\n", what);
  std::abort();
}

}  // namespace distrain::base
