// An echo over LibTorch's TensorPipeAgent, called from C++.
#pragma once

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "bench/echo_peer.h"
#include "oracle/official_agent.h"

namespace distrain::bench {

class TorchEcho final : public EchoPeer {
 public:
  explicit TorchEcho(const EchoSetup& setup)
      : agent_(oracle::start_official_agent(
            c10::make_intrusive<c10d::FileStore>(setup.folder + "/store", 2), setup.rank, 2,
            setup.transport == "tcp" ? "uv" : setup.transport)),
        // The cheapest operator that returns its argument.
        op_(oracle::find_operator("aten::positive", "")),
        peer_(agent_->getWorkerInfo(oracle::official_name(1 - setup.rank))) {}

  at::Tensor echo(const at::Tensor& tensor) override {
    return oracle::reply_value(send(tensor)).toTensor();
  }

  double flood(const at::Tensor& tensor, int64_t calls, int64_t in_flight) override {
    return keep_in_flight(
        calls, in_flight, [&] { return send(tensor); },
        [](const oracle::OfficialReply& reply) { oracle::reply_value(reply); });
  }

 private:
  oracle::OfficialReply send(const at::Tensor& tensor) {
    return agent_->send(peer_, oracle::script_call(op_, {tensor}));
  }

  oracle::OfficialAgent agent_;
  std::shared_ptr<torch::jit::Operator> op_;
  const torch::distributed::rpc::WorkerInfo& peer_;
};

}  // namespace distrain::bench
