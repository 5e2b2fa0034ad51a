#pragma once

#include <cstdint>
#include <string>

namespace distrain::app {

struct ListenSocket {
  int fd = -1;
  uint16_t port = 0;
};

/// A listening TCP socket on `host`; port 0: any free one. `else_any`: when `host` is no address of
/// this machine (a service name of Kubernetes), every interface. Throws `rendezvous` naming
/// host:port.
ListenSocket listen_on(const std::string& host, int port, bool else_any);

}  // namespace distrain::app
