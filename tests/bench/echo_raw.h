// The floor under every echo: blocking reads and writes on one socket, no threads, no format.
#pragma once

#include <cstring>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "bench/echo_peer.h"

namespace distrain::bench {

class RawEcho final : public EchoPeer {
 public:
  explicit RawEcho(const EchoSetup& setup) : fd_(connect_socket(setup)) {}

  at::Tensor echo(const at::Tensor& tensor) override {
    header_.bytes = static_cast<uint64_t>(tensor.nbytes());
    write_all(fd_, &header_, sizeof header_);
    write_all(fd_, tensor.const_data_ptr(), tensor.nbytes());
    if (!reply_.defined() || reply_.nbytes() != tensor.nbytes()) reply_ = at::empty_like(tensor);
    if (!read_all(fd_, &header_, sizeof header_) ||
        !read_all(fd_, reply_.mutable_data_ptr(), reply_.nbytes())) {
      throw std::runtime_error("the raw echo's server went away");
    }
    return reply_;
  }

  double flood(const at::Tensor&, int64_t, int64_t) override { return 0; }

  void serve() override {
    std::vector<char> body;
    while (read_all(fd_, &header_, sizeof header_)) {
      body.resize(header_.bytes);
      if (!read_all(fd_, body.data(), body.size())) return;
      write_all(fd_, &header_, sizeof header_);
      write_all(fd_, body.data(), body.size());
    }
  }

 private:
  struct Header {  // as large as a frame's header and one tensor's descriptor would be
    uint64_t bytes = 0;
    char rest[56] = {};
  };

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

  const int fd_;  // closed by the process's end
  Header header_;
  at::Tensor reply_;
};

}  // namespace distrain::bench
