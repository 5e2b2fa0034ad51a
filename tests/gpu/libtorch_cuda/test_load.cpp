// ctest: timeout=120
// Tests the errors of cuda::load() and of the plugin. Each check runs in its own process, because
// LibTorch looks for CUDA only once and a process can load only one driver.
#include <functional>
#include <string>

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/cuda/load.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain {
namespace {

/// Runs `before` and `use` in a child process. Returns kind and message of the error of `use`.
std::string refusal_after(
    const std::function<void()>& before, const std::function<void()>& use = [] { cuda::load(); }) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    before();
    const base::Error error = testing::error_of(use);
    const std::string text = std::string(base::kind_name(error.kind)) + ": " + error.message;
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char buffer[1024];
  for (ssize_t size; (size = read(ends[0], buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<size_t>(size));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  return text;
}

TEST_CASE("load() names a seed, a backward pass or a query that came before CUDA was loaded") {
  const auto refused = Catch::StartsWith(
      "invalid: torch::manual_seed(), backward() or torch::cuda::is_available() was called before "
      "CUDA was loaded");
  CHECK_THAT(refusal_after([] { at::manual_seed(1); }), refused);
  CHECK_THAT(refusal_after([] { at::ones({3}).requires_grad_().sum().backward(); }), refused);
  CHECK_THAT(refusal_after([] { at::globalContext().hasCUDA(); }), refused);
  CHECK(refusal_after([] { at::rand({3, 3}).mm(at::rand({3, 3})); }) == "internal: (no error)");
}

TEST_CASE("a driver that is too old is reported with the required version") {
  const std::string refusal = refusal_after(
      [] {
        // The CUDA runtime uses a libcuda.so.1 that is already loaded, here a fake one.
        if (!dlopen(DISTRAIN_OLD_DRIVER, RTLD_NOW | RTLD_GLOBAL)) _exit(2);
      },
      [] { cuda::load().device_count(); });
  CHECK_THAT(refusal, Catch::StartsWith("resources: this machine's NVIDIA driver is too old: it "
                                        "runs programs up to CUDA 12.4, LibTorch's CUDA 13.0 needs "
                                        "driver 580 or newer"));
}

}  // namespace
}  // namespace distrain
