#include "targets.h"

namespace distrain::fuzz {

std::span<const Target> targets() {
  static const std::vector<Target> all = {kMessage, kTrace, kCollective, kManifest,
                                          kGzip,    kIdx,   kSafetensors};
  return all;
}

}  // namespace distrain::fuzz
