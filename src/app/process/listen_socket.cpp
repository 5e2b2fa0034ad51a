#include "process/listen_socket.h"

#include "distrain/net/socket.h"

namespace distrain::app {

ListenSocket listen_on(const std::string& host, int port, bool else_any) {
  auto socket = net::listen_tcp(host, static_cast<uint16_t>(port), else_any);
  const int fd = socket.value().release();
  return {fd, net::local_name(fd).port};
}

}  // namespace distrain::app
