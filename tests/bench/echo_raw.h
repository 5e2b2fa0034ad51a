// The lower bound of every echo: blocking socket reads and writes, no threads, no serialization.
#pragma once

#include <algorithm>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/uio.h>

#include "bench/echo_peer.h"

namespace distrain::bench {

class RawEcho final : public EchoPeer {
 public:
  explicit RawEcho(const EchoSetup& setup) : fd_(connect_socket(setup)) {}

  at::Tensor echo(const at::Tensor& tensor) override {
    if (!reply_.defined() || reply_.nbytes() != tensor.nbytes()) reply_ = at::empty_like(tensor);
    header_.bytes = tensor.nbytes();
    send(tensor.const_data_ptr(), tensor.nbytes());
    if (receive(reply_.mutable_data_ptr(), reply_.nbytes()) != reply_.nbytes()) {
      throw std::runtime_error("the raw echo's server went away");
    }
    return reply_;
  }

  double flood(const at::Tensor&, int64_t, int64_t) override { return 0; }

  void serve() override {
    std::vector<char> body;  // usually the next body has the same size
    for (;;) {
      size_t done = receive(body.data(), body.size());
      if (done == kEnd) return;
      body.resize(header_.bytes);
      if (done < body.size() && !read_all(fd_, body.data() + done, body.size() - done)) return;
      send(body.data(), body.size());
    }
  }

 private:
  struct Header {  // has the size of a frame's header with one tensor descriptor
    uint64_t bytes = 0;
    char rest[56] = {};
  };

  static constexpr size_t kEnd = ~size_t{0};

  // Sends header and body with one system call if the socket's buffer has room.
  void send(const void* body, size_t size) {
    iovec parts[2] = {{&header_, sizeof header_}, {const_cast<void*>(body), size}};
    const ssize_t done = ::writev(fd_, parts, 2);
    if (done < static_cast<ssize_t>(sizeof header_)) throw std::runtime_error("write failed");
    const size_t written = static_cast<size_t>(done) - sizeof header_;
    write_all(fd_, static_cast<const char*>(body) + written, size - written);
  }

  // Reads the header and up to `size` bytes of the body. Returns kEnd at the end of the stream.
  size_t receive(void* body, size_t size) {
    iovec parts[2] = {{&header_, sizeof header_}, {body, size}};
    const ssize_t first = ::readv(fd_, parts, 2);
    if (first <= 0) return kEnd;
    auto got = static_cast<size_t>(first);
    if (got < sizeof header_) {
      if (!read_all(fd_, reinterpret_cast<char*>(&header_) + got, sizeof header_ - got))
        return kEnd;
      got = sizeof header_;
    }
    got -= sizeof header_;
    const size_t wanted = std::min<size_t>(size, header_.bytes);
    if (got < wanted && !read_all(fd_, static_cast<char*>(body) + got, wanted - got)) return kEnd;
    return wanted;
  }

  static int connect_socket(const EchoSetup& setup) {
    if (setup.transport == "unix") return setup.pair_fd;
    int fd = -1;
    if (setup.rank == 0) {
      fd = accept(setup.listen_fd, nullptr, nullptr);
    } else {
      fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(setup.port);
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fd = -1;
    }
    if (fd < 0) throw std::runtime_error("the raw echo's sockets did not meet");
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
  }

  const int fd_;  // closed when the process ends
  Header header_;
  at::Tensor reply_;
};

}  // namespace distrain::bench
