#pragma once

#include <memory>
#include <string>

#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "distrain/base/result.h"

namespace distrain::net {

// What sockets that block and sockets of the loop have in common.

/// `resources` where descriptors or memory are short, else `rendezvous`: "connecting to …: why".
base::Error socket_error(const std::string& what, int code);

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
/// Asks the system, blocking for as long as that takes unless `flags` have AI_NUMERICHOST.
base::Result<AddressList> resolve(const std::string& host, uint16_t port, int flags);

struct UnixAddress {
  sockaddr_un address{};
  socklen_t size = 0;
};
base::Result<UnixAddress> unix_address(const std::string& path);

/// Where nobody listens on a port of the ephemeral range, the kernel may choose just that port for
/// the connecting socket, which then finds itself.
bool is_connected_to_itself(int fd);

}  // namespace distrain::net
