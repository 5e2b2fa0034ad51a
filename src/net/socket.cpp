#include "distrain/net/socket.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/future.h"
#include "net_impl.h"

namespace distrain::net {

using base::Error;
using base::ErrorKind;

namespace {

// Removes the brackets that an IPv6 address has before a port: "[::1]" becomes "::1".
std::string without_brackets(const std::string& host) {
  const bool has_brackets = host.starts_with('[') && host.ends_with(']');
  return has_brackets ? host.substr(1, host.size() - 2) : host;
}

// Returns true if one of `addresses` is this machine's, so that a socket can be bound to it.
bool is_local(const AddressList& addresses) {
  for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
    const Fd fd = open_socket(a->ai_family);
    if (fd.valid() && ::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0) return true;
  }
  return false;
}

// Resolves `host` on a detached thread, because getaddrinfo() may block for half a minute and
// cannot be cancelled. The thread is abandoned if it does not answer by `deadline`.
base::Result<AddressList> resolve_until(const std::string& host, uint16_t port,
                                        base::TimePoint deadline) {
  if (auto numeric = resolve(host, port, AI_NUMERICHOST); numeric.ok()) return numeric;
  base::Promise<AddressList> promise;
  const base::Future<AddressList> found = promise.future();
  try {
    std::thread([promise = std::move(promise), host, port]() mutable {
      promise.complete(resolve(host, port, 0));
    }).detach();
  } catch (const std::system_error&) {
    return Error{ErrorKind::kResources, "host '" + host + "': no thread to look for it"};
  }
  if (found.wait_until(deadline)) return std::move(found.state()->result());
  return Error{ErrorKind::kRendezvous, "host '" + host + "': the name server does not answer"};
}

// Returns the name of one end of a socket; `ask` is getsockname() or getpeername().
template <class Ask>
SocketName name_of(int fd, Ask ask) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (ask(fd, any, &size) != 0 || address.ss_family == AF_UNIX) return {};
  // Use getnameinfo(), because it adds the interface of a link-local address: fe80::1%eth0.
  char text[NI_MAXHOST] = {};
  getnameinfo(any, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  // Report an IPv4-mapped address as IPv4, the form in which other hosts connect to it.
  const std::string host = text;
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);  // IPv6 has its port there, too
  return {host.starts_with("::ffff:") ? host.substr(7) : host, ntohs(v4.sin_port)};
}

bool is_loopback_address(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  return false;
}

bool are_loopback(const AddressList& addresses) {
  for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
    if (!is_loopback_address(a->ai_addr)) return false;
  }
  return true;
}

// Connects by `deadline`. Returns an errno, or 0 if connected.
int connect_until(int fd, const sockaddr* address, socklen_t size, base::TimePoint deadline) {
  if (::connect(fd, address, size) == 0) return 0;
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  for (;;) {
    const auto left = deadline - base::Clock::now();
    if (left <= base::Duration::zero()) return ETIMEDOUT;
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
    pollfd item{fd, POLLOUT, 0};
    const int ready = ::poll(&item, 1, static_cast<int>(std::min<int64_t>(ms, 1000)));
    if (ready > 0) return socket_option(fd, SOL_SOCKET, SO_ERROR);
    if (ready < 0 && errno != EINTR) return errno;
  }
}

// An address and port in the format of /proc/net/tcp: hexadecimal words in memory order.
struct Place {
  std::string v6;
  std::string v4;  // empty if the address is neither IPv4 nor an IPv4-mapped IPv6 address
};

Place place_of(const sockaddr_storage& address) {
  std::array<uint32_t, 4> words{0, 0, htonl(0xffff), 0};  // ::ffff:a.b.c.d
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (address.ss_family == AF_INET) {
    std::memcpy(&words[3], &v4.sin_addr, sizeof v4.sin_addr);
  } else {
    std::memcpy(words.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
  }
  // sockaddr_in and sockaddr_in6 have the port at the same offset.
  const std::string v4_text = fmt::format("{:08X}:{:04X}", words[3], ntohs(v4.sin_port));
  const bool is_v4 = words[0] == 0 && words[1] == 0 && words[2] == htonl(0xffff);
  return {fmt::format("{:08X}{:08X}{:08X}", words[0], words[1], words[2]) + v4_text,
          is_v4 ? v4_text : ""};
}

// Returns the user who owns the connected socket with these two ends, if it is open on this host.
std::optional<uint32_t> owner_in(const char* table, const std::string& own,
                                 const std::string& other) {
  const std::string row = ' ' + own + ' ' + other + " 01 ";  // 01: established
  std::ifstream in(table);
  for (std::string line; std::getline(in, line);) {
    const size_t at = line.find(row);
    if (at == std::string::npos) continue;
    std::string queues, timer, retransmits;
    uint32_t user = 0;
    std::istringstream rest(line.substr(at + row.size()));
    if (rest >> queues >> timer >> retransmits >> user) return user;
  }
  return std::nullopt;
}

std::optional<uint32_t> owner_of_unix_peer(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer.uid;
}

std::optional<uint32_t> owner_of_tcp_peer(int fd, const sockaddr_storage& local) {
  // If the two ends' addresses differ, the peer is on this host only if its address is loopback.
  const std::string other_host = remote_name(fd).host;
  if (other_host != local_name(fd).host && !is_loopback(other_host)) return std::nullopt;
  sockaddr_storage remote{};
  socklen_t size = sizeof remote;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &size) != 0) return std::nullopt;
  const Place here = place_of(local), there = place_of(remote);
  // Look in tcp6 first: either end may be an IPv6 socket with an IPv4-mapped address.
  if (const auto user = owner_in("/proc/self/net/tcp6", there.v6, here.v6)) return user;
  if (here.v4.empty()) return std::nullopt;
  return owner_in("/proc/self/net/tcp", there.v4, here.v4);
}

// Returns true if `user` is the overflow uid, which stands for users outside this user namespace.
bool is_of_outside(uint32_t user) {
  uint32_t overflow = 0, first = 0, outside = 0, count = 0;
  std::ifstream("/proc/sys/kernel/overflowuid") >> overflow;
  std::ifstream("/proc/self/uid_map") >> first >> outside >> count;
  return user == overflow && count != UINT32_MAX;
}

}  // namespace

Error socket_error(const std::string& what, int code) {
  const bool exhausted = code == EMFILE || code == ENFILE || code == ENOMEM || code == ENOBUFS;
  return Error{exhausted ? ErrorKind::kResources : ErrorKind::kRendezvous,
               what + ": " + std::strerror(code)};
}

Fd open_socket(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

int socket_option(int fd, int level, int name) {
  int value = 0;
  socklen_t size = sizeof value;
  getsockopt(fd, level, name, &value, &size);
  return value;
}

void set_socket_option(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof value);
}

void avoid_bbr(int fd) {
  char name[16] = {};
  socklen_t size = sizeof name;
  getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size);
  if (!std::string_view(name, size).starts_with("bbr")) return;
  for (const std::string_view other : {"cubic", "reno"}) {
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, other.data(), other.size()) == 0) return;
  }
}

std::string endpoint_text(const std::string& given, uint16_t port) {
  const std::string host = without_brackets(given);
  const bool is_v6 = host.find(':') != std::string::npos;
  return (is_v6 ? "[" + host + "]" : host.empty() ? "*" : host) + ":" + std::to_string(port);
}

base::Result<UnixAddress> unix_address(const std::string& path) {
  UnixAddress made;
  made.address.sun_family = AF_UNIX;
  if (path.size() >= sizeof made.address.sun_path) {
    return Error{ErrorKind::kRendezvous, "the path of a unix socket is too long: " + path};
  }
  std::memcpy(made.address.sun_path, path.data(), path.size());
  made.size = sizeof made.address;
  if (path.starts_with('@')) {  // an abstract name, which has no null at its end
    made.address.sun_path[0] = '\0';
    made.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  }
  return made;
}

bool is_connected_to_itself(int fd) {
  const SocketName local = local_name(fd);
  const SocketName remote = remote_name(fd);
  return local.port != 0 && local.port == remote.port && local.host == remote.host;
}

base::Result<AddressList> resolve(const std::string& given, uint16_t port, int flags) {
  const std::string host = without_brackets(given);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(),
                               &hints, &found);
  if (code != 0) return Error{ErrorKind::kRendezvous, "host '" + host + "': " + gai_strerror(code)};
  return AddressList(found, &freeaddrinfo);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  const Fd old(std::exchange(fd_, other.release()));
  return *this;
}

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

base::Result<Fd> listen_tcp(const std::string& host, uint16_t port) {
  const std::string where = "listening on " + endpoint_text(host, port);
  auto addresses = resolve(host, port, AI_PASSIVE);
  if (!addresses.ok()) {
    return Error{addresses.error().kind, where + ": " + addresses.error().message};
  }
  Error error{ErrorKind::kRendezvous, where + ": no address"};
  // To listen on all interfaces, prefer an IPv6 socket, because it accepts IPv4 connections, too.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* a = addresses.unchecked().get(); a; a = a->ai_next) {
      // A name such as localhost has both families: prefer IPv4, so that all clients can connect.
      const int wanted = host.empty() ? family : family == AF_INET6 ? AF_INET : AF_INET6;
      if (a->ai_family != wanted) continue;
      Fd fd = open_socket(a->ai_family);
      if (!fd.valid()) {
        error = socket_error(where, errno);
        continue;
      }
      set_socket_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
      if (a->ai_family == AF_INET6) {  // overrides the system's default
        set_socket_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, host.empty() ? 0 : 1);
      }
      if (::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(fd.get(), 1024) == 0) {
        return fd;
      }
      const int code = errno;
      error = socket_error(where, code);
      // Do not try another address: clients would reach the server that uses this address.
      if (code == EADDRINUSE) return error;
    }
  }
  return error;
}

base::Result<Fd> listen_tcp(const std::string& host, PortRange ports) {
  for (int port = ports.first; port < ports.last; ++port) {
    base::Result<Fd> socket = listen_tcp(host, static_cast<uint16_t>(port));
    if (socket.ok() || socket.error().kind != ErrorKind::kRendezvous) return socket;
  }
  base::Result<Fd> socket = listen_tcp(host, ports.last);
  if (socket.ok() || ports.first == ports.last) return socket;
  return Error{ErrorKind::kRendezvous, "no port from " + std::to_string(ports.first) +
                                           " on is free: " + socket.error().message};
}

// Returns a unix socket for which `use`, such as ::connect, has returned 0.
template <class Use>
static base::Result<Fd> unix_socket(const std::string& path, const char* doing, const Use& use) {
  const base::Result<UnixAddress> where = unix_address(path);
  if (!where.ok()) return where.error();
  const auto& [address, size] = where.unchecked();
  Fd fd = open_socket(AF_UNIX);
  const auto* const to = reinterpret_cast<const sockaddr*>(&address);
  if (fd.valid() && use(fd.get(), to, size) == 0) return fd;
  return socket_error(doing + path, errno);
}

base::Result<Fd> listen_unix(const std::string& path) {
  return unix_socket(path, "listening on ", [](int fd, const sockaddr* address, socklen_t size) {
    return ::bind(fd, address, size) == 0 ? ::listen(fd, 1024) : -1;
  });
}

base::Result<Fd> connect_tcp(const std::string& host, uint16_t port, base::TimePoint deadline) {
  auto addresses = resolve_until(host, port, deadline);
  if (!addresses.ok()) {
    Error error = addresses.error();
    error.op = kResolve;
    return error;
  }
  const std::string where = "connecting to " + endpoint_text(host, port);
  Error error{ErrorKind::kRendezvous, where + ": no address"};
  int addresses_left = 0;
  for (const addrinfo* a = addresses.unchecked().get(); a; a = a->ai_next) ++addresses_left;
  for (const addrinfo* a = addresses.unchecked().get(); a; a = a->ai_next, --addresses_left) {
    Fd fd = open_socket(a->ai_family);
    // Each address gets a share of the time, so that a silent address leaves time for the others.
    const base::TimePoint now = base::Clock::now();
    const base::TimePoint until = now + (deadline - now) / addresses_left;
    int code = fd.valid() ? connect_until(fd.get(), a->ai_addr, a->ai_addrlen, until) : errno;
    if (code == 0 && is_connected_to_itself(fd.get())) code = ECONNREFUSED;
    if (code == 0) return fd;
    error = socket_error(where, code);
  }
  return error;
}

base::Result<Fd> connect_unix(const std::string& path) {
  return unix_socket(path, "connecting to ", ::connect);
}

SocketName local_name(int fd) { return name_of(fd, ::getsockname); }
SocketName remote_name(int fd) { return name_of(fd, ::getpeername); }

std::optional<uint32_t> peer_user(int fd) {
  sockaddr_storage local{};
  socklen_t size = sizeof local;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) != 0) return std::nullopt;
  const std::optional<uint32_t> user =
      local.ss_family == AF_UNIX ? owner_of_unix_peer(fd) : owner_of_tcp_peer(fd, local);
  return user && is_of_outside(*user) ? std::nullopt : user;
}

bool is_loopback(const std::string& host) {
  const auto addresses = resolve(host, 0, 0);
  return addresses.ok() && are_loopback(addresses.unchecked());
}

base::Result<std::string> host_to_bind(const std::string& host) {
  const bool is_numeric = resolve(host, 0, AI_NUMERICHOST).ok();
  const auto addresses = resolve(host, 0, 0);
  const std::string to_do =
      ": rank 0 listens on an address of its own host, or on another one by --listen ADDR";
  if (!addresses.ok()) return Error{addresses.error().kind, addresses.error().message + to_do};
  if (are_loopback(addresses.unchecked())) {
    return is_numeric || host == "localhost" ? host : std::string();
  }
  if (is_local(addresses.unchecked())) return host;
  if (!is_numeric) return std::string();
  return Error{ErrorKind::kRendezvous, host + " is no address of this host" + to_do};
}

std::string host_key() {
  std::string key;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> key;
  if (key.empty()) return {};  // unknown: counts as another host
  struct stat info {};
  if (::stat("/proc/self/ns/net", &info) != 0) return {};
  return key + "/" + std::to_string(info.st_ino);
}

}  // namespace distrain::net
