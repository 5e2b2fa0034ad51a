// LibTorch's C++ RPC agent, set up as LibTorch's Python bindings set it up.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>
#include <torch/csrc/jit/runtime/operator.h>

namespace distrain::oracle {

namespace official = torch::distributed;
using OfficialAgent = std::shared_ptr<official::rpc::TensorPipeAgent>;
using OfficialReply = c10::intrusive_ptr<c10::ivalue::Future>;

inline std::string official_name(int rank) { return "worker" + std::to_string(rank); }

/// Starts the agent of this process, which can have only one because torch keeps it in a global.
/// `transport` is "shm", "uv" (TCP), or empty for torch's choice. If `gpu` is given, tensors on
/// that GPU arrive on the same GPU on every rank.
inline OfficialAgent start_official_agent(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                          int world_size, const std::string& transport,
                                          std::optional<c10::Device> gpu = std::nullopt) {
  namespace rpc = official::rpc;
  std::optional<std::vector<std::string>> transports;
  if (!transport.empty()) transports.emplace({transport});
  rpc::TensorPipeRpcBackendOptions options(/*numWorkerThreads=*/4, transports, std::nullopt,
                                           /*rpcTimeout=*/60, "env://");
  std::vector<c10::Device> devices;
  std::unordered_map<std::string, rpc::DeviceMap> maps;
  if (gpu) {
    devices.push_back(*gpu);
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != rank) maps[official_name(peer)] = {{*gpu, *gpu}};
    }
    options.deviceMaps = maps;
    options.devices = devices;
  }
  auto agent = std::make_shared<rpc::TensorPipeAgent>(
      store, official_name(rank), static_cast<rpc::worker_id_t>(rank), world_size, options, maps,
      devices, std::make_unique<rpc::RequestCallbackNoPython>());
  rpc::RpcAgent::setCurrentRpcAgent(agent);
  official::autograd::DistAutogradContainer::init(rank);
  agent->setTypeResolver(
      std::make_shared<rpc::TypeResolver>([](const c10::QualifiedName& name) -> c10::StrongTypePtr {
        return {nullptr, torch::jit::ScriptTypeParser().parseType(name.qualifiedName())};
      }));
  agent->start();
  return agent;
}

/// Returns the operator with a name and an overload, such as "aten::mul" and "Tensor".
inline std::shared_ptr<torch::jit::Operator> find_operator(const std::string& name,
                                                           const std::string& overload) {
  for (const auto& candidate : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (candidate->schema().overload_name() == overload) return candidate;
  }
  throw std::runtime_error("LibTorch has no operator " + name + "." + overload);
}

inline c10::intrusive_ptr<official::rpc::Message> script_call(
    const std::shared_ptr<torch::jit::Operator>& op, std::vector<c10::IValue> arguments) {
  return official::rpc::ScriptCall(op, std::move(arguments)).toMessage();
}

/// Waits for the reply to a ScriptCall; throws the error of the callee.
inline c10::IValue reply_value(const OfficialReply& reply) {
  reply->waitAndThrow();
  const auto message = reply->value().toCustomClass<official::rpc::Message>();
  official::rpc::MessageType type = message->type();
  const auto response = official::rpc::deserializeResponse(*message, type);
  return dynamic_cast<official::rpc::ScriptResp&>(*response).value();
}

}  // namespace distrain::oracle
