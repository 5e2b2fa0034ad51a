// Helpers for child processes that save checkpoints and are killed or stopped during a save.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/catch.h"

namespace distrain::store {

// Runs `function` in a child process and returns its exit code. Only files outlive the child.
inline int in_child(const std::function<int()>& function) {
  const pid_t child = fork();
  if (child == 0) _exit(function());
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

constexpr int kNoSeccomp = 77;

// Makes every later system call `number` of this process fail with `error`.
inline void forbid(long number, int error) {
  const sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{std::size(filter), const_cast<sock_filter*>(filter)};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) _exit(kNoSeccomp);
}

}  // namespace distrain::store
