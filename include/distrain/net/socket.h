#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "distrain/base/clock.h"
#include "distrain/base/result.h"
#include "distrain/net/loop.h"
#include "distrain/net/port_range.h"

namespace distrain::net {

/// A file descriptor that is closed with its owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

/// A bound and listening TCP socket. `host` empty: all interfaces; `port` 0: any free one.
/// `rendezvous` when it is taken, `resources` without descriptors. Starts no thread.
base::Result<Fd> listen_tcp(const std::string& host, uint16_t port);
base::Result<Fd> listen_tcp(const std::string& host, PortRange ports);
/// A path that begins with '@' is a name in this network namespace, without a file.
base::Result<Fd> listen_unix(const std::string& path);

inline constexpr const char* kResolve = "resolve";
/// Connects to a TCP `host:port`, blocking the calling thread until `deadline` at the latest. All
/// addresses of the name are tried in turn. An error with the `op` kResolve means that the name has
/// no address.
base::Result<Fd> connect_tcp(const std::string& host, uint16_t port, base::TimePoint deadline);

/// Connects to a unix socket at once, or not at all.
base::Result<Fd> connect_unix(const std::string& path);

/// As connect_tcp() for a numeric `host`, on the loop thread, which calls `done` unless it ends.
using OnConnected = std::function<void(base::Result<Fd>)>;
void connect_tcp_on_loop(Loop& loop, const std::string& host, uint16_t port,
                         base::TimePoint deadline, OnConnected done);
void connect_unix_on_loop(Loop& loop, const std::string& path, base::TimePoint deadline,
                          OnConnected done);

/// The numeric address and port of a socket's own or the other end; host empty for a unix socket.
struct SocketName {
  std::string host;
  uint16_t port = 0;
};
SocketName local_name(int fd);
SocketName remote_name(int fd);

/// The user whose process is at the other end of a connected socket, unix or TCP. Nothing if that
/// cannot be told: the other end is on another host or in another network namespace, or closed.
std::optional<uint32_t> peer_user(int fd);

/// Whether the name resolves to loopback addresses only. Blocks, unless it is numeric.
bool is_loopback(const std::string& host);
/// Returns what a server listens on, as for listen_tcp(), that clients reach at `host`: that
/// interface; all interfaces if `host` is a name that resolves to another machine (a service of
/// Kubernetes), or to loopback here and to this machine elsewhere (Debian's /etc/hosts has
/// 127.0.1.1 for the own name). `rendezvous` if the name does not resolve, or if `host` is the
/// numeric address of another machine. Blocks, unless it is numeric.
base::Result<std::string> host_to_bind(const std::string& host);
/// "10.0.0.2:4711", "[::1]:4711".
std::string endpoint_text(const std::string& host, uint16_t port);

/// Equal for two processes that share a kernel and a network namespace (boot id and inode): a unix
/// socket may reach from one to the other. It does not if they see different folders.
std::string host_key();

/// Accepts connections on the loop. Destroying it on the loop thread stops that at once; elsewhere
/// soon after: an `on_connection` may still run. The socket is closed with it.
class Listener {
 public:
  /// `on_connection` gets each connected socket, non-blocking, on the loop thread.
  Listener(Loop& loop, Fd socket, std::function<void(Fd)> on_connection);
  ~Listener();
  /// While it does not accept, connections wait in the kernel's backlog. On the loop thread.
  void set_accepting_on_loop(bool accepts);
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace distrain::net
