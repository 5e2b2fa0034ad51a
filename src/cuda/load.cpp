#include "distrain/cuda/load.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>

#include "distrain/base/error.h"

namespace distrain::cuda {
namespace {

namespace fs = std::filesystem;

constexpr char kPluginName[] = "libdistrain_cuda.so";
constexpr char kTorchName[] = "libtorch_cuda.so";

[[noreturn]] void fail(const std::string& message) {
  throw base::Exception(base::ErrorKind::kResources, message);
}

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

/// Returns `path` with its links resolved, if it exists.
fs::path real_path(const fs::path& path) {
  std::error_code error;
  fs::path real = fs::canonical(path, error);
  return error ? path : real;
}

/// Returns the folder of the library or program that has this symbol; empty if unknown.
fs::path folder_of(const void* symbol) {
  Dl_info info{};
  if (!dladdr(symbol, &info) || !info.dli_fname) return {};
  return real_path(info.dli_fname).parent_path();
}

fs::path find_plugin() {
  if (const char* const given = std::getenv("DISTRAIN_CUDA_LIBRARY"); given && *given) {
    if (!is_file(given)) fail(std::string("DISTRAIN_CUDA_LIBRARY=") + given + " is no file");
    return given;
  }
  const fs::path folder = real_path("/proc/self/exe").parent_path();
  // The plugin is beside the program or this library in a build. If installed, it is in
  // DISTRAIN_LIBDIR, and the program `distrain` in libexec/distrain.
  static const char kHere = 0;
  for (const fs::path& place :
       {folder, folder_of(&kHere), folder.parent_path().parent_path() / DISTRAIN_LIBDIR}) {
    if (is_file(place / kPluginName)) return place / kPluginName;
  }
  fail(
      "this distrain was built without CUDA: there is no libdistrain_cuda.so beside it. Build it "
      "where the CUDA Toolkit and NCCL are, or name that file in DISTRAIN_CUDA_LIBRARY");
}

/// Returns the version of the LibTorch in `folder` (lib/), from a file of its wheel or archive.
std::optional<std::string> torch_version_of(const fs::path& folder) {
  std::string line;
  for (std::ifstream file(folder.parent_path() / "version.py"); std::getline(file, line);) {
    // For example: __version__ = '2.11.0+cu130'
    if (line.rfind("__version__", 0) != 0) continue;
    const size_t from = line.find_first_of("'\"");
    if (from == std::string::npos) continue;
    return line.substr(from + 1, line.find_first_of("'\"+", from + 1) - from - 1);
  }
  if (std::ifstream file(folder.parent_path() / "build-version"); std::getline(file, line)) {
    return line.substr(0, line.find('+'));
  }
  return std::nullopt;
}

/// Returns the libtorch_cuda.so that belongs to the LibTorch in `folder`.
fs::path find_torch_cuda(const fs::path& folder) {
  // `./run` puts .deps/site/torch/lib and .deps/cuda/torch/lib beside each other.
  const fs::path fetched = folder.parent_path().parent_path().parent_path() / "cuda/torch/lib";
  for (const fs::path& place : {folder, fetched}) {
    if (!is_file(place / kTorchName)) continue;
    // Libraries in one folder have the same version, even if no file states it.
    const std::string version =
        torch_version_of(place).value_or(place == folder ? TORCH_VERSION : "of an unknown version");
    if (version == TORCH_VERSION) return place / kTorchName;
    fail((place / kTorchName).string() + " is of LibTorch " + version +
         ", this distrain of LibTorch " TORCH_VERSION ": run `./run cuda` again");
  }
  std::string message =
      "LibTorch's CUDA library is not here: run `./run cuda`, which fetches it and NVIDIA's "
      "libraries (2.4 GB), or use LIBTORCH=<a LibTorch with CUDA>";
  if (!is_file("/proc/driver/nvidia/version")) {
    message += "; but this machine shows no NVIDIA driver";
  }
  fail(message);
}

void* open_library(const fs::path& path, int flags) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | flags);
  if (!library) {
    const char* const reason = dlerror();
    fail("can't load " + path.string() + ": " + (reason ? reason : "no reason given"));
  }
  return library;
}

const Plugin& load_once() {
  const fs::path plugin_path = find_plugin();
  const fs::path folder = folder_of(reinterpret_cast<void*>(&at::globalContext));
  if (folder.empty()) fail("can't tell where LibTorch lies");
  const fs::path torch_cuda = find_torch_cuda(folder);
  // The library's search path leads to its NVIDIA libraries. The scope is global because the plugin
  // and other LibTorch libraries find their symbols there. The library is never closed.
  open_library(torch_cuda, RTLD_GLOBAL);
  // LibTorch looks for CUDA once, at the first query, and keeps the answer.
  if (!at::detail::getCUDAHooks().isBuilt()) {
    base::invalid(
        "torch::manual_seed(), backward() or torch::cuda::is_available() was called before CUDA "
        "was loaded, so LibTorch will find no GPU in this process: call them in a rank's function, "
        "or distrain::cuda::load() before them");
  }
  if (torch_cuda.parent_path() != folder) {
    // LibTorch later opens these libraries by name and searches only its own folder, so load them
    // here. Ignore a failure (libcaffe2_nvrtc.so needs a driver): LibTorch reports it later.
    for (const char* name : {"libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so"}) {
      dlopen((torch_cuda.parent_path() / name).c_str(), RTLD_LAZY | RTLD_LOCAL);
    }
  }
  void* const library = open_library(plugin_path, RTLD_LOCAL);
  const auto entry = reinterpret_cast<PluginEntry>(dlsym(library, kPluginEntry));
  const Plugin* const plugin = entry ? entry(kPluginInterface) : nullptr;
  if (!plugin) fail(plugin_path.string() + " belongs to another version of distrain");
  return *plugin;
}

}  // namespace

const Plugin& load() {
  static const Plugin& plugin = load_once();  // after an exception, the next call tries again
  return plugin;
}

}  // namespace distrain::cuda
