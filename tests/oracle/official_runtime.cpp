#include "oracle/official_runtime.h"

#include <stdexcept>
#include <string>
#include <utility>

#include <torch/csrc/distributed/autograd/engine/dist_engine.h>
#include <torch/csrc/distributed/autograd/utils.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "oracle/official_agent.h"

namespace distrain::oracle {
namespace {

using official::autograd::DistAutogradContainer;
using torch::jit::Stack;

constexpr const char* kNested = "aten::distrain_nested(Tensor x, Tensor y) -> Tensor";
// aten::embedding_bag has four results, but a ScriptCall allows only one.
constexpr const char* kEmbeddingBag =
    "aten::distrain_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool sparse)"
    " -> Tensor";
constexpr const char* kLookup = "aten::distrain_lookup(Tensor indices, Tensor offsets) -> Tensor";

// Calls an operator on this process, the only worker, with autograd, as Python's rpc_sync does.
c10::IValue call(official::rpc::RpcAgent& agent, const std::string& name,
                 const std::string& overload, std::vector<c10::IValue> arguments) {
  return reply_value(official::autograd::sendMessageWithAutograd(
      agent, agent.getWorkerInfo(official_name(0)),
      script_call(find_operator(name, overload), std::move(arguments)),
      /*forceGradRecording=*/true));
}

at::Tensor call_add(official::rpc::RpcAgent& agent, const at::Tensor& x, const at::Tensor& y) {
  return call(agent, "aten::add", "Tensor", {x, y, 1}).toTensor();
}

// Registers an operator in the namespace aten, because a ScriptCall may call no other namespace.
class Handler {
 public:
  Handler(const char* schema, torch::jit::Operation run) {
    torch::jit::Operator op(schema, std::move(run), c10::AliasAnalysisKind::FROM_SCHEMA);
    schema_ = std::make_unique<c10::FunctionSchema>(op.schema());
    torch::jit::registerOperator(std::move(op));
  }
  ~Handler() { torch::jit::deregisterOperator(*schema_); }
  Handler(const Handler&) = delete;
  Handler& operator=(const Handler&) = delete;

 private:
  std::unique_ptr<c10::FunctionSchema> schema_;
};

// Creates a context and makes it current on this thread; the destructor releases it.
class Context {
 public:
  Context() : context_(DistAutogradContainer::getInstance().newContext()) {}
  ~Context() { DistAutogradContainer::getInstance().releaseContext(context_->contextId()); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void backward(const at::Tensor& loss) {
    if (context_->sendFunctions().empty() || context_->recvFunctions().empty()) {
      throw std::logic_error("the graph made no call with autograd: there is nothing to compare");
    }
    official::autograd::DistEngine::getInstance().execute(context_->contextId(), {loss}, false);
  }
  at::Tensor gradient(const at::Tensor& leaf) const {
    const auto all = context_->getGradients();
    const auto found = all.find(leaf);
    return found == all.end() ? at::Tensor() : found->value();
  }

 private:
  official::autograd::ContextPtr context_;
};

}  // namespace

struct OfficialRuntime::State {
  OfficialAgent agent;
  at::Tensor table;  // the table of the current graph, which the handler `lookup` reads
  std::unique_ptr<Handler> nested;
  std::unique_ptr<Handler> embedding_bag;
  std::unique_ptr<Handler> lookup;
};

class OfficialRuntime::Ops final : public RemoteOps {
 public:
  explicit Ops(official::rpc::RpcAgent& agent) : agent_(agent) {}

  at::Tensor mul(const at::Tensor& x, const at::Tensor& y) override {
    return call(agent_, "aten::mul", "Tensor", {x, y}).toTensor();
  }
  at::Tensor add(const at::Tensor& x, const at::Tensor& y) override {
    return call_add(agent_, x, y);
  }
  at::Tensor nested(const at::Tensor& x, const at::Tensor& y) override {
    return call(agent_, "aten::distrain_nested", "", {x, y}).toTensor();
  }
  at::Tensor embedding_bag(const at::Tensor& weight, const at::Tensor& indices,
                           const at::Tensor& offsets, bool sparse) override {
    return call(agent_, "aten::distrain_embedding_bag", "", {weight, indices, offsets, sparse})
        .toTensor();
  }
  at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) override {
    return call(agent_, "aten::distrain_lookup", "", {indices, offsets}).toTensor();
  }

 private:
  official::rpc::RpcAgent& agent_;
};

OfficialRuntime::OfficialRuntime() : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.agent = start_official_agent(c10::make_intrusive<c10d::HashStore>(), 0, 1, "");
  official::rpc::RpcAgent& agent = *state.agent;
  state.nested = std::make_unique<Handler>(kNested, [&agent](Stack& stack) {
    const at::Tensor y = torch::jit::pop(stack).toTensor();
    const at::Tensor x = torch::jit::pop(stack).toTensor();
    stack.emplace_back(nested_value(x, y, [&agent](const at::Tensor& a, const at::Tensor& b) {
      return call_add(agent, a, b);
    }));
  });
  state.embedding_bag = std::make_unique<Handler>(kEmbeddingBag, [](Stack& stack) {
    const bool sparse = torch::jit::pop(stack).toBool();
    const at::Tensor offsets = torch::jit::pop(stack).toTensor();
    const at::Tensor indices = torch::jit::pop(stack).toTensor();
    const at::Tensor weight = torch::jit::pop(stack).toTensor();
    stack.emplace_back(embedding_bag_value(weight, indices, offsets, sparse));
  });
  state.lookup = std::make_unique<Handler>(kLookup, [&state](Stack& stack) {
    const at::Tensor offsets = torch::jit::pop(stack).toTensor();
    const at::Tensor indices = torch::jit::pop(stack).toTensor();
    stack.emplace_back(embedding_bag_value(state.table, indices, offsets, true));
  });
}

OfficialRuntime::~OfficialRuntime() {
  state_->agent->join(/*shutdown=*/true);
  state_->agent->shutdown();
  official::rpc::RpcAgent::setCurrentRpcAgent(nullptr);
}

std::vector<at::Tensor> OfficialRuntime::gradients(const Graph& graph) {
  state_->table = graph.table;
  Context context;
  Ops ops(*state_->agent);
  context.backward(graph.loss(ops, graph.leaves));
  std::vector<at::Tensor> result;
  for (const at::Tensor& leaf : graph.leaves) result.push_back(context.gradient(leaf));
  result.push_back(context.gradient(graph.table));
  return result;
}

}  // namespace distrain::oracle
