#pragma once

#include <cstdint>

namespace distrain::net {

/// Ports to try in order until one is free. Both zero: any port.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
};

}  // namespace distrain::net
