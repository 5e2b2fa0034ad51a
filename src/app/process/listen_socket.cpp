#include "process/listen_socket.h"

#include <memory>

#include <errno.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "distrain/base/error.h"

namespace distrain::app {
namespace {

constexpr int kBacklog = 1024;

/// The listening socket, or -1 and errno.
int try_listen(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0 && listen(fd, kBacklog) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

uint16_t port_of(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size);
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

}  // namespace

ListenSocket listen_on(const std::string& host, int port, bool else_any) {
  const auto fail = [&](const char* why) {
    throw base::Exception(base::ErrorKind::kRendezvous,
                          fmt::format("cannot listen on {}:{}: {}", host, port, why));
  };
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string service = fmt::format("{}", port);
  if (const int rc = getaddrinfo(host.c_str(), service.c_str(), &hints, &found)) {
    fail(gai_strerror(rc));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  int error = 0;
  // IPv4 first: "localhost" is 127.0.0.1 for every rank then.
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* address = found; address; address = address->ai_next) {
      if (address->ai_family != family) continue;
      const int fd = try_listen(*address);
      if (fd >= 0) return ListenSocket{fd, port_of(fd)};
      if (error == 0 || error == EADDRNOTAVAIL) error = errno;
    }
  }
  if (else_any && error == EADDRNOTAVAIL) return listen_on("0.0.0.0", port, false);
  fail(strerror(error));
  return {};
}

}  // namespace distrain::app
