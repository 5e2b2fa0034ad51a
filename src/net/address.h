#pragma once

#include <memory>
#include <string>

#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "distrain/base/result.h"
#include "distrain/net/socket.h"

namespace distrain::net {

/// Returns an error for errno `code`: `resources` if descriptors or memory are exhausted, else
/// `rendezvous`. The message is "`what`: " and the reason.
base::Error socket_error(const std::string& what, int code);

/// Opens a stream socket that does not block, and that a new program does not inherit.
Fd open_socket(int family);
/// Returns an option of the socket, or 0 if it has no such option.
int socket_option(int fd, int level, int name);
void set_socket_option(int fd, int level, int name, int value);

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
/// Calls getaddrinfo(), which may block for long unless `flags` include AI_NUMERICHOST.
base::Result<AddressList> resolve(const std::string& host, uint16_t port, int flags);

struct UnixAddress {
  sockaddr_un address{};
  socklen_t size = 0;
};
base::Result<UnixAddress> unix_address(const std::string& path);

/// Returns true if a socket is connected to itself: if nobody listens on a port of the ephemeral
/// range, the kernel may choose that port for the connecting socket.
bool is_connected_to_itself(int fd);

}  // namespace distrain::net
