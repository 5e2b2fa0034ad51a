#include <cstdlib>
#include <fstream>

#include "distrain/base/error.h"
#include "distrain/base/process.h"
#include "distrain/cuda/load.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain {
namespace {

TEST_CASE("a missing plugin is named, and the next call looks for it again") {
  setenv("DISTRAIN_CUDA_LIBRARY", "/nowhere/libdistrain_cuda.so", 1);
  for (int i = 0; i < 2; ++i) {
    const base::Error error = testing::error_of([] { cuda::load(); });
    CHECK(error.kind == base::ErrorKind::kResources);
    CHECK(error.message == "DISTRAIN_CUDA_LIBRARY=/nowhere/libdistrain_cuda.so is no file");
  }
  unsetenv("DISTRAIN_CUDA_LIBRARY");
}

}  // namespace
}  // namespace distrain
