// libtorch_cpu.so exports another version of libuv. Our code must not call torch's version.
#include <string>

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <uv.h>

#include "support/catch.h"

namespace {

std::string object_of(void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 ? info.dli_fname : "";
}

}  // namespace

TEST_CASE("our libuv and torch's libuv are different objects") {
  REQUIRE(at::ones({2}).sum().item<double>() == 2.0);  // forces the link to torch
  void* const ours = reinterpret_cast<void*>(&uv_write);
  void* const torchs = dlsym(RTLD_DEFAULT, "uv_write");
  REQUIRE(torchs != nullptr);
  CHECK(ours != torchs);
  CHECK(object_of(ours) == object_of(reinterpret_cast<void*>(&object_of)));
  CHECK(object_of(torchs).find("libtorch_cpu.so") != std::string::npos);
  CHECK(uv_version() == UV_VERSION_HEX);
}
