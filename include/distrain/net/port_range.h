#pragma once

#include <cstdint>

namespace distrain::net {

/// Ports to listen on, the first of them that is free. Both zero: any.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
};

}  // namespace distrain::net
