// An echo over distrain's own RPC agent.
#pragma once

#include "bench/echo_peer.h"
#include "distrain/rpc/agent.h"

namespace distrain::bench {

inline at::Tensor echo_tensor(at::Tensor tensor) { return tensor; }
// In place, because the received tensor belongs to the function.
inline at::Tensor add_one_to(at::Tensor tensor) { return tensor.add_(1); }
inline void take_tensor(const at::Tensor&) {}

class DistrainEcho final : public EchoPeer {
 public:
  explicit DistrainEcho(const EchoSetup& setup) : agent_(options(setup)) {
    agent_.expose<&echo_tensor>("echo");
    agent_.expose<&add_one_to>("add_one");
    agent_.expose<&take_tensor>("take");
    agent_.join();
    if (agent_.transport() != setup.transport) {
      throw std::runtime_error("connected by " + agent_.transport());
    }
  }

  at::Tensor echo(const at::Tensor& tensor) override {
    return agent_.rpc_sync<&echo_tensor>(1, tensor);
  }

  at::Tensor add_one(const at::Tensor& tensor) override {
    return agent_.rpc_sync<&add_one_to>(1, tensor);
  }
  void take(const at::Tensor& tensor) override { agent_.rpc_sync<&take_tensor>(1, tensor); }

  double flood(const at::Tensor& tensor, int64_t calls, int64_t in_flight) override {
    return keep_in_flight(
        calls, in_flight, [&] { return agent_.rpc_async<&echo_tensor>(1, tensor); },
        [](const base::Future<at::Tensor>& reply) { reply.wait(); });
  }

 private:
  static rpc::AgentOptions options(const EchoSetup& setup) {
    rpc::AgentOptions options;
    options.rank = setup.rank;
    options.world_size = 2;
    options.names = {"caller", "server"};
    options.transport = setup.transport;
    options.master_port = setup.port;
    if (setup.rank == 0) options.listen_fd = setup.listen_fd;
    // No timeout, because this process is stopped while other implementations are measured.
    options.peer_timeout = std::chrono::nanoseconds(0);
    return options;
  }

  rpc::Agent agent_;
};

}  // namespace distrain::bench
