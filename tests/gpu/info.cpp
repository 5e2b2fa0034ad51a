// Prints a JSON line for each GPU that distrain sees, or an `error` line with exit code 9.
#include <cstdio>

#include <nlohmann/json.hpp>
#include <torch/headeronly/version.h>

#include "distrain/base/error.h"
#include "distrain/cuda/load.h"

int main() {
  using nlohmann::ordered_json;
  try {
    const distrain::cuda::Plugin& plugin = distrain::cuda::load();
    const int count = plugin.device_count();
    for (int i = 0; i < count; ++i) {
      const ordered_json line{{"event", "gpu"},
                              {"index", i},
                              {"name", plugin.device_name(i)},
                              {"id", plugin.device_id(i)},
                              {"versions", plugin.versions()},
                              {"torch", TORCH_VERSION}};
      std::printf("%s\n", line.dump().c_str());
    }
    return 0;
  } catch (const distrain::base::Exception& error) {
    const ordered_json line{{"event", "error"},
                            {"kind", distrain::base::kind_name(error.kind())},
                            {"message", error.what()}};
    std::printf("%s\n", line.dump().c_str());
    return distrain::base::exit_code(error.kind());
  }
}
