// ctest: timeout=120
// Tests the plugin with LibTorch's CUDA library, which `./run cuda` fetches; runs on any machine.
#include <fstream>
#include <iostream>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include "distrain/base/error.h"
#include "distrain/cuda/load.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain {
namespace {

using base::ErrorKind;
using testing::error_of;

/// Returns the files that are mapped into this process, by library name without ".so".
std::map<std::string, std::set<std::string>> libraries() {
  std::map<std::string, std::set<std::string>> found;
  std::string line;
  for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) {
    const size_t path = line.find('/');
    const size_t end = line.find(".so");
    if (path == std::string::npos || end == std::string::npos) continue;
    const size_t name = line.rfind('/', end) + 1;
    found[line.substr(name, end - name)].insert(line.substr(path));
  }
  return found;
}

TEST_CASE("the plugin loads beside CPU work and reports why no GPU can be used") {
  REQUIRE(libraries().count("libtorch_cuda") == 0);
  REQUIRE(!c10::impl::hasDeviceGuardImpl(c10::kCUDA));

  const cuda::Plugin& plugin = cuda::load();
  CHECK(&cuda::load() == &plugin);
  CHECK(c10::impl::hasDeviceGuardImpl(c10::kCUDA));
  std::cout << plugin.versions() << "\n";
  CHECK(plugin.versions().find("CUDA 1") == 0);
  CHECK(plugin.versions().find("NCCL 2.") != std::string::npos);

  const auto mapped = libraries();
  for (const char* name : {"libcudart", "libnccl", "libcublas", "libcudnn", "libtorch_cpu",
                           "libtorch_cuda", "libc10", "libc10_cuda", "libdistrain_cuda"}) {
    INFO(name);
    REQUIRE(mapped.count(name) == 1);
    CHECK(mapped.at(name).size() == 1);
  }
  void* const opened_later = dlopen("libtorch_cuda_linalg.so", RTLD_LAZY);
  CHECK(opened_later);
  CHECK(at::ones({3}).sum().item<float>() == 3);

  if (mapped.count("libcuda")) {
    std::cout << "this machine has a driver\n";
    return;  // tests with the label gpu check the rest
  }
  const base::Error error = error_of([&plugin] { plugin.device_count(); });
  std::cout << error.message << "\n";
  CHECK(error.kind == ErrorKind::kResources);
  CHECK(error.message.find("no NVIDIA driver on this machine") != std::string::npos);
  CHECK(error_of([&plugin] { plugin.device_name(0); }).kind == ErrorKind::kResources);
  CHECK(error_of([&plugin] { plugin.make_communicator(cuda::NcclId{}, 1, 0, 0); }).kind ==
        ErrorKind::kResources);
  CHECK_THROWS_WITH(at::zeros({1}, c10::kCUDA), ContainsSubstring("NVIDIA driver"));
  CHECK(at::ones({3}).sum().item<float>() == 3);
}

}  // namespace
}  // namespace distrain
