#include <atomic>
#include <csignal>
#include <thread>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "net_support.h"

using namespace distrain;
using namespace distrain::net;
using testing::contains;

namespace {

template <class T>
base::Error error_of(const base::Result<T>& result) {
  REQUIRE_FALSE(result.ok());
  return result.error();
}

base::TimePoint soon() { return base::deadline_after(kLongest); }

bool has_ipv6() { return listen_tcp("::1", 0).ok(); }

// Returns a link-local address of this host such as "fe80::1%eth0", or "" if there is none.
std::string link_local_address() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, &freeifaddrs);
  for (const ifaddrs* each = all; each; each = each->ifa_next) {
    if (!each->ifa_addr || each->ifa_addr->sa_family != AF_INET6) continue;
    const auto* address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
    if (!IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) continue;
    char text[INET6_ADDRSTRLEN] = {};
    inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text);
    return std::string(text) + '%' + each->ifa_name;
  }
  return {};
}

}  // namespace

TEST_CASE("an Fd closes its descriptor once") {
  int pipe_fds[2];
  REQUIRE(::pipe(pipe_fds) == 0);
  Fd read_end(pipe_fds[0]);
  {
    Fd write_end(pipe_fds[1]);
    Fd moved = std::move(write_end);
    CHECK_FALSE(write_end.valid());  // NOLINT: moved from on purpose
    CHECK(moved.get() == pipe_fds[1]);
    Fd& itself = moved;
    moved = std::move(itself);
    CHECK(moved.valid());
  }
  char byte;
  CHECK(::read(read_end.get(), &byte, 1) == 0);
  const int released = read_end.release();
  CHECK_FALSE(read_end.valid());
  CHECK(::close(released) == 0);
}

TEST_CASE("TCP sockets listen and connect") {
  for (const std::string host : {"", "127.0.0.1", "localhost"}) {
    const Fd listener = std::move(listen_tcp(host, 0).value());
    const uint16_t port = local_name(listener.get()).port;
    REQUIRE(port != 0);
    const Fd client =
        std::move(connect_tcp(host.empty() ? "127.0.0.1" : host, port, soon()).value());
    const Fd server = accept_one(listener);
    CHECK(remote_name(client.get()).port == port);
    CHECK(local_name(client.get()).port == remote_name(server.get()).port);
    CHECK(remote_name(server.get()).host == "127.0.0.1");  // also if the listener accepts IPv6
  }
  if (has_ipv6()) {
    const Fd all = std::move(listen_tcp("", 0).value());
    CHECK(connect_tcp("::1", local_name(all.get()).port, soon()).ok());
  }
}

TEST_CASE("listening on a taken port is a rendezvous error that names the port") {
  for (const std::string host : {"127.0.0.1", "localhost", ""}) {
    const Fd first = std::move(listen_tcp(host, 0).value());
    const uint16_t port = local_name(first.get()).port;
    const base::Error error = error_of(listen_tcp(host, port));
    CHECK(error.kind == base::ErrorKind::kRendezvous);
    CHECK(contains(error.message, (host.empty() ? "*" : host) + ":" + std::to_string(port)));
  }
  const Fd narrow = std::move(listen_tcp("127.0.0.1", 0).value());
  CHECK_FALSE(listen_tcp("", local_name(narrow.get()).port).ok());
}

TEST_CASE("a port is free again as soon as its listener is closed") {
  uint16_t port = 0;
  {
    const Fd listener = std::move(listen_tcp("127.0.0.1", 0).value());
    port = local_name(listener.get()).port;
    const Fd client = std::move(connect_tcp("127.0.0.1", port, soon()).value());
    const Fd server = accept_one(listener);
  }
  CHECK(listen_tcp("127.0.0.1", port).ok());
}

TEST_CASE("listening on an address of another machine, or on an invalid address, fails") {
  CHECK(error_of(listen_tcp("192.0.2.1", 0)).kind == base::ErrorKind::kRendezvous);
  const base::Error error = error_of(listen_tcp("no-such-host.invalid", 29500));
  CHECK(error.kind == base::ErrorKind::kRendezvous);
  CHECK(contains(error.message, "listening on no-such-host.invalid:29500: host "));
}

TEST_CASE("connecting to a closed port fails at once and names the address") {
  uint16_t port = 0;
  { port = local_name(std::move(listen_tcp("127.0.0.1", 0).value()).get()).port; }
  const base::TimePoint start = base::Clock::now();
  const base::Error error = error_of(connect_tcp("127.0.0.1", port, start + kLongest));
  CHECK(base::Clock::now() - start < kLongest / 2);
  CHECK(error.kind == base::ErrorKind::kRendezvous);
  CHECK(contains(error.message, "127.0.0.1:" + std::to_string(port)));
}

TEST_CASE("connecting to an unknown host fails and names it") {
  const base::Error error = error_of(connect_tcp("no-such-host.invalid", 1, soon()));
  CHECK(error.kind == base::ErrorKind::kRendezvous);
  CHECK(contains(error.message, "no-such-host.invalid"));
}

TEST_CASE("connecting fails at its deadline") {
  // Fills the backlog of a listener. A further connect_tcp() then waits until its deadline.
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(::listen(listener.get(), 0) == 0);
  const uint16_t port = local_name(listener.get()).port;
  std::vector<Fd> held;
  for (;;) {
    REQUIRE(held.size() < 20);
    const base::TimePoint start = base::Clock::now();
    auto result = connect_tcp("127.0.0.1", port, start + 30ms);
    if (result.ok()) {
      held.push_back(std::move(result.value()));
      continue;
    }
    CHECK(base::Clock::now() - start >= 30ms);
    CHECK(base::Clock::now() - start < 10s);
    CHECK(contains(error_of(result).message, std::to_string(port)));
    break;
  }
}

TEST_CASE("unix sockets listen and connect") {
  const TempDir folder;
  const Fd listener = std::move(listen_unix(folder / "s").value());
  const Fd client = std::move(connect_unix(folder / "s").value());
  const Fd server = accept_one(listener);
  CHECK((::fcntl(client.get(), F_GETFL) & O_NONBLOCK) != 0);
  CHECK(remote_name(client.get()).host.empty());
  CHECK(local_name(server.get()).host.empty());
  CHECK(error_of(listen_unix(folder / "s")).kind == base::ErrorKind::kRendezvous);
  const base::Error nobody = error_of(connect_unix(folder / "t"));
  CHECK(nobody.kind == base::ErrorKind::kRendezvous);
  CHECK(contains(nobody.message, folder / "t"));
}

TEST_CASE("the path of a unix socket may have at most 107 bytes") {
  const TempDir folder;
  const std::string prefix = folder / "";
  const std::string longest = prefix + std::string(107 - prefix.size(), 'x');
  const Fd listener = std::move(listen_unix(longest).value());
  CHECK(connect_unix(longest).ok());
  for (const auto& result :
       {error_of(listen_unix(longest + "x")), error_of(connect_unix(longest + "x"))}) {
    CHECK(result.kind == base::ErrorKind::kRendezvous);
    CHECK(contains(result.message, longest + "x"));
  }
}

TEST_CASE("sockets are not inherited by programs that the process starts") {
  const TempDir folder;
  for (const Fd& fd :
       {std::move(listen_tcp("127.0.0.1", 0).value()), std::move(listen_unix(folder / "s").value()),
        std::move(connect_unix(folder / "s").value())}) {
    CHECK((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
  }
}

TEST_CASE("running out of descriptors is a resources error") {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const rlimit none{3, 3};
    setrlimit(RLIMIT_NOFILE, &none);
    for (int fd = 3; fd < 64; ++fd) ::close(fd);
    const bool right =
        listen_tcp("127.0.0.1", 0).error().kind == base::ErrorKind::kResources &&
        connect_tcp("127.0.0.1", 1, soon()).error().kind == base::ErrorKind::kResources &&
        listen_unix("/tmp/x").error().kind == base::ErrorKind::kResources;
    bool loop_refused = false;
    try {
      Loop loop;
    } catch (const base::Exception& e) {
      loop_refused = e.kind() == base::ErrorKind::kResources;
    }
    _exit(right && loop_refused ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("local host names are recognized") {
  CHECK(is_loopback("localhost"));
  CHECK(is_loopback("127.0.0.1"));
  CHECK(is_loopback("127.8.9.10"));
  CHECK_FALSE(is_loopback("192.0.2.1"));
  CHECK_FALSE(is_loopback("no-such-host.invalid"));
}

TEST_CASE("a server listens on the interface of its host name, or on all interfaces") {
  for (const std::string host : {"localhost", "127.0.0.1", "127.8.9.10", "::1", "[::1]"}) {
    CHECK(host_to_bind(host).value() == host);
  }
  // A host's own name may be a loopback name in /etc/hosts. Then a server uses all interfaces.
  for (const char* host : {"ip6-localhost", "localhost.localdomain"}) {
    if (is_loopback(host)) CHECK(host_to_bind(host).value().empty());
  }
}

TEST_CASE("a server refuses an address of another machine, and a name that does not resolve") {
  CHECK(error_of(host_to_bind("192.0.2.1")).message.starts_with("192.0.2.1 is no address of this"));
  const base::Error error = error_of(host_to_bind("no-such-host.invalid"));
  CHECK(error.kind == base::ErrorKind::kRendezvous);
  CHECK(error.message.find("--listen") != std::string::npos);
}

TEST_CASE("an IPv6 address may be in brackets, and a link-local one keeps its interface") {
  if (!has_ipv6()) return;
  const Fd listener = std::move(listen_tcp("[::1]", 0).value());
  const SocketName name = local_name(listener.get());
  CHECK(name.host == "::1");
  CHECK(endpoint_text("[::1]", 7) == "[::1]:7");
  CHECK(connect_tcp("[::1]", name.port, base::deadline_after(std::chrono::seconds(5))).ok());
  const std::string link_local = link_local_address();
  if (link_local.empty()) return;
  const Fd scoped = std::move(listen_tcp(link_local, 0).value());
  CHECK(local_name(scoped.get()).host == link_local);
}

TEST_CASE("the host key is the same in the whole process and in its children") {
  const std::string key = host_key();
  CHECK_FALSE(key.empty());
  CHECK(host_key() == key);
  const pid_t child = fork();
  if (child == 0) _exit(host_key() == key ? 0 : 1);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

// ---- Listener ----

TEST_CASE("a listener accepts many connections, concurrent and sequential") {
  Loop loop;
  Fd socket = std::move(listen_tcp("127.0.0.1", 0).value());
  const uint16_t port = local_name(socket.get()).port;
  std::atomic<int> accepted{0};
  std::atomic<bool> on_loop_thread{true}, nonblocking{true};
  std::vector<Fd> held;
  const Listener listener(loop, std::move(socket), [&](Fd fd) {
    on_loop_thread = on_loop_thread && loop.in_loop();
    nonblocking = nonblocking && (::fcntl(fd.get(), F_GETFL) & O_NONBLOCK) != 0;
    held.push_back(std::move(fd));
    ++accepted;
  });
  constexpr int kThreads = 4, kEach = 25;
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) failed += !connect_tcp("127.0.0.1", port, soon()).ok();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const base::TimePoint end = soon();
  while (accepted < kThreads * kEach && base::Clock::now() < end) std::this_thread::yield();
  CHECK(failed == 0);
  CHECK(accepted == kThreads * kEach);
  CHECK(on_loop_thread);
  CHECK(nonblocking);
  on_loop(loop, [&held] { held.clear(); });
}

TEST_CASE("a listener accepts connections that were made before it was created") {
  const TempDir folder;
  Fd socket = std::move(listen_unix(folder / "s").value());
  const Fd first = std::move(connect_unix(folder / "s").value());
  const Fd second = std::move(connect_unix(folder / "s").value());
  Loop loop;
  std::atomic<int> accepted{0};
  const Listener listener(loop, std::move(socket), [&](Fd) { ++accepted; });
  CHECK(raw_read(first.get(), 1).empty());
  CHECK(raw_read(second.get(), 1).empty());
  CHECK(accepted == 2);
}

TEST_CASE("a listener may be destroyed while others connect") {
  for (int round = 0; round < 20; ++round) {
    Loop loop;
    Fd socket = std::move(listen_tcp("127.0.0.1", 0).value());
    const uint16_t port = local_name(socket.get()).port;
    std::atomic<bool> refused{false};
    std::thread client([&] {
      while (connect_tcp("127.0.0.1", port, soon()).ok()) {
      }
      refused = true;
    });
    {
      std::atomic<int> accepted{0};
      auto listener = std::make_unique<Listener>(loop, std::move(socket), [&](Fd) { ++accepted; });
      while (accepted <= round % 4) std::this_thread::yield();
      listener.reset();
      on_loop(loop, [] {});  // the listener's callback is not called after this
    }
    client.join();
    CHECK(refused);
  }
}

TEST_CASE("a listener may destroy itself inside on_connection, or outlive its loop") {
  const TempDir folder;
  {
    Loop loop;
    std::unique_ptr<Listener> listener;
    std::atomic<int> accepted{0};
    Fd socket = std::move(listen_unix(folder / "a").value());
    on_loop(loop, [&] {
      listener = std::make_unique<Listener>(loop, std::move(socket), [&](Fd) {
        ++accepted;
        listener.reset();
      });
    });
    const Fd client = std::move(connect_unix(folder / "a").value());
    CHECK(raw_read(client.get(), 1).empty());
    on_loop(loop, [] {});
    const base::TimePoint end = soon();
    while (connect_unix(folder / "a").ok() && base::Clock::now() < end) std::this_thread::yield();
    CHECK(accepted == 1);
    CHECK_FALSE(connect_unix(folder / "a").ok());
  }
  std::unique_ptr<Listener> listener;
  {
    Loop loop;
    listener =
        std::make_unique<Listener>(loop, std::move(listen_unix(folder / "b").value()), [](Fd) {});
  }
  CHECK_FALSE(connect_unix(folder / "b").ok());  // the loop has closed the listener
  listener.reset();
}

// Without a free descriptor, a connection stays in the backlog, so the socket stays readable. The
// listener must pause instead of spinning, and continue when descriptors are free again.
TEST_CASE("a listener without free descriptors pauses and continues later") {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    {
      Loop loop;
      Fd socket = std::move(listen_tcp("127.0.0.1", 0).value());
      const uint16_t port = local_name(socket.get()).port;
      std::vector<Fd> clients;
      for (int i = 0; i < 3; ++i) {
        clients.push_back(std::move(connect_tcp("127.0.0.1", port, soon()).value()));
      }
      const rlimit few{64, 64};
      setrlimit(RLIMIT_NOFILE, &few);
      std::vector<Fd> fill;
      for (;;) {
        Fd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        if (!fd.valid()) break;
        fill.push_back(std::move(fd));
      }
      std::atomic<int> accepted{0};
      std::vector<Fd> held;
      const Listener listener(loop, std::move(socket), [&](Fd fd) {
        held.push_back(std::move(fd));
        ++accepted;
      });
      on_loop(loop, [] {});
      const bool pauses = uses_no_cpu();
      if (accepted != 0) _exit(1);
      if (!pauses) _exit(2);
      fill.clear();
      const base::TimePoint end = base::Clock::now() + 20s;
      while (accepted < 3 && base::Clock::now() < end) std::this_thread::yield();
      if (accepted != 3) _exit(3);
    }
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("an abstract unix socket needs no file, and its name is free when it is closed") {
  const std::string name = "@distrain-test-" + std::to_string(getpid());
  {
    const Fd listener = std::move(listen_unix(name).value());
    CHECK(error_of(listen_unix(name)).kind == base::ErrorKind::kRendezvous);
    const Fd client = std::move(connect_unix(name).value());
    CHECK(accept_one(listener).valid());
    CHECK_FALSE(connect_unix(name + "x").ok());
  }
  const base::Error gone = error_of(connect_unix(name));
  CHECK(gone.kind == base::ErrorKind::kRendezvous);
  CHECK(contains(gone.message, name));
}

TEST_CASE("the loop connects by TCP and reports why it could not connect") {
  Loop loop;
  const auto connect = [&](const std::string& host, uint16_t port) {
    return connected_on_loop(loop, [&](OnConnected done) {
      connect_tcp_on_loop(loop, host, port, soon(), std::move(done));
    });
  };
  uint16_t port = 0;
  {
    const Fd listener = std::move(listen_tcp("127.0.0.1", 0).value());
    port = local_name(listener.get()).port;
    const Fd client = std::move(connect("127.0.0.1", port).value());
    CHECK(remote_name(client.get()).port == port);
    CHECK(accept_one(listener).valid());
  }
  const base::Error refused = error_of(connect("127.0.0.1", port));
  CHECK(refused.kind == base::ErrorKind::kRendezvous);
  CHECK(contains(refused.message, std::to_string(port)));
  // A host name is refused because looking it up would block the loop.
  CHECK(error_of(connect("localhost", port)).kind == base::ErrorKind::kRendezvous);
}

TEST_CASE("connecting to a listener that does not accept ends at the deadline or with the loop") {
  const TempDir folder;
  const Fd listener = std::move(listen_unix(folder / "s").value());
  REQUIRE(::listen(listener.get(), 0) == 0);  // room for one connection
  const Fd first = std::move(connect_unix(folder / "s").value());
  bool is_told = false;
  {
    Loop loop;
    const base::Error late = error_of(connected_on_loop(loop, [&](OnConnected done) {
      connect_unix_on_loop(loop, folder / "s", base::deadline_after(30ms), std::move(done));
    }));
    CHECK(contains(late.message, std::strerror(ETIMEDOUT)));
    on_loop(loop, [&] {
      connect_unix_on_loop(loop, folder / "s", base::kNever, [&](auto) { is_told = true; });
    });
  }
  CHECK_FALSE(is_told);
}
