#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "distrain/net/loop.h"

namespace distrain::net {

/// Ports to try in order until one is free. If both are 0, the kernel chooses a free port.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
};

/// Owns a file descriptor and closes it.
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

/// Returns a TCP socket that listens on `host` (empty: all interfaces) and `port` (0: any). Fails
/// with `rendezvous` if the port is taken, `resources` if no descriptor is left. Starts no thread.
base::Result<Fd> listen_tcp(const std::string& host, uint16_t port);
base::Result<Fd> listen_tcp(const std::string& host, PortRange ports);
/// Listens on a unix socket. If `path` begins with '@', it is an abstract name, without a file.
base::Result<Fd> listen_unix(const std::string& path);

inline constexpr const char* kResolve = "resolve";
/// Connects to TCP `host:port` and blocks until `deadline` at the latest. Tries all addresses of
/// `host` in turn. An error whose `op` is kResolve means that `host` could not be resolved.
base::Result<Fd> connect_tcp(const std::string& host, uint16_t port, base::TimePoint deadline);
/// Connects to a unix socket without blocking. Fails if it cannot connect at once.
base::Result<Fd> connect_unix(const std::string& path);

/// Receives the connected socket or an error.
using OnConnected = std::function<void(base::Result<Fd>)>;
/// These functions connect without blocking, on the loop thread, and then call `done` there, unless
/// the loop ends first. `host` must be numeric.
void connect_tcp_on_loop(Loop& loop, const std::string& host, uint16_t port,
                         base::TimePoint deadline, OnConnected done);
void connect_unix_on_loop(Loop& loop, const std::string& path, base::TimePoint deadline,
                          OnConnected done);

/// The numeric address and port of one end of a socket; `host` is empty for a unix socket.
struct SocketName {
  std::string host;
  uint16_t port = 0;
};
SocketName local_name(int fd);
SocketName remote_name(int fd);
/// Returns the user of the process at the other end of a connected socket, unix or TCP. Returns
/// nullopt if that end is closed, on another host or in another network or user namespace.
std::optional<uint32_t> peer_user(int fd);
/// Returns true if `host` resolves to loopback addresses only. Blocks, unless `host` is numeric.
bool is_loopback(const std::string& host);
/// Returns the host to pass to listen_tcp() so that clients reach the server at `host`. Returns an
/// empty text (all interfaces) if the name resolves to another machine, as for a Kubernetes
/// service, or if a name other than localhost resolves only to loopback, as Debian maps a host's
/// own name to 127.0.1.1. Otherwise returns `host`. Fails with `rendezvous` if the name does not
/// resolve, or if `host` is another machine's numeric address. Blocks, unless `host` is numeric.
base::Result<std::string> host_to_bind(const std::string& host);
/// Returns host and port as text: "10.0.0.2:4711" or "[::1]:4711".
std::string endpoint_text(const std::string& host, uint16_t port);
/// Returns a key that is equal for processes with the same kernel and network namespace (boot id
/// and inode), which can share unix sockets if they see the same folders. Returns "" if unknown.
std::string host_key();

/// Accepts connections on the loop thread and owns the socket. If another thread destroys the
/// listener, `on_connection` may still run for a moment.
class Listener {
 public:
  /// Calls `on_connection` with each connected, non-blocking socket on the loop thread.
  Listener(Loop& loop, Fd socket, std::function<void(Fd)> on_connection);
  ~Listener();
  /// Pauses or resumes accepting. While paused, new connections wait in the kernel's backlog.
  void set_accepting_on_loop(bool accepts);
  Listener(Listener&&) = delete;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace distrain::net
