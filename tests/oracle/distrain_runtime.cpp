#include "oracle/distrain_runtime.h"

#include "distrain/autograd/context.h"

namespace distrain::oracle {
namespace {

using rpc::RRef;

at::Tensor mul(at::Tensor x, at::Tensor y) { return x * y; }
at::Tensor add(at::Tensor x, at::Tensor y) { return x + y; }
at::Tensor nested(rpc::CallContext& context, at::Tensor x, at::Tensor y) {
  return nested_value(x, y, [&](const at::Tensor& a, const at::Tensor& b) {
    return context.agent.rpc_sync<&add>(context.caller, a, b);
  });
}
at::Tensor bag(at::Tensor weight, at::Tensor indices, at::Tensor offsets, bool sparse) {
  return embedding_bag_value(weight, indices, offsets, sparse);
}

// Both functions run on the callee, which fetches `x` with to_here() unless it owns `x`.
at::Tensor add_to(const RRef<at::Tensor>& x, at::Tensor y) { return x.to_here() + y; }
at::Tensor mul_by(const RRef<at::Tensor>& x, at::Tensor y) { return x.to_here() * y; }

struct Table {
  using Constructor = Table(at::Tensor values);
  // Makes `weight` a leaf of this rank, because gradient() finds only gradients of local leaves.
  explicit Table(at::Tensor values) : weight(values.detach().clone().requires_grad_()) {}
  at::Tensor forward(at::Tensor indices, at::Tensor offsets) {
    return embedding_bag_value(weight, indices, offsets, true);
  }
  at::Tensor gradient(rpc::CallContext& context, uint64_t id) {
    return autograd::gradient(context.agent, id, weight);
  }
  at::Tensor weight;
};

void setup(rpc::Agent& agent) {
  autograd::install(agent);
  agent.expose<&mul>("mul");
  agent.expose<&add>("add");
  agent.expose<&nested>("nested");
  agent.expose<&bag>("bag");
  agent.expose<&add_to>("add_to");
  agent.expose<&mul_by>("mul_by");
  agent.expose_class<Table>("Table");
  agent.expose<&Table::forward>("Table.forward");
  agent.expose<&Table::gradient>("Table.gradient");
}

class Ops final : public RemoteOps {
 public:
  Ops(testing::Cluster& cluster, const at::Tensor& table)
      : agent_(cluster[0]),
        last_(cluster.size() - 1),
        table_(agent_.remote_new<Table>(1, table.detach())) {}

  at::Tensor mul(const at::Tensor& x, const at::Tensor& y) override {
    return agent_.rpc_sync<&oracle::mul>(1, x, y);
  }
  at::Tensor add(const at::Tensor& x, const at::Tensor& y) override {
    return agent_.rpc_sync<&oracle::add>(1, x, y);
  }
  at::Tensor nested(const at::Tensor& x, const at::Tensor& y) override {
    return agent_.rpc_sync<&oracle::nested>(1, x, y);
  }
  at::Tensor chain(const at::Tensor& x, const at::Tensor& y) override {
    const RRef<at::Tensor> product = agent_.remote<&oracle::mul>(last_, x, y);
    const RRef<at::Tensor> sum = agent_.remote<&add_to>(1, product, x);
    return agent_.remote<&mul_by>(last_, sum, y).to_here();
  }
  at::Tensor embedding_bag(const at::Tensor& weight, const at::Tensor& indices,
                           const at::Tensor& offsets, bool sparse) override {
    return agent_.rpc_sync<&bag>(1, weight, indices, offsets, sparse);
  }
  at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) override {
    return table_.rpc_sync<&Table::forward>(indices, offsets);
  }
  at::Tensor table_gradient(uint64_t context) {
    const rpc::ContextScope outside(0);
    return table_.rpc_sync<&Table::gradient>(context);
  }

 private:
  rpc::Agent& agent_;
  const int last_;
  const RRef<Table> table_;
};

}  // namespace

DistrainRuntime::DistrainRuntime(int world_size,
                                 const std::function<void(rpc::AgentOptions&)>& each)
    : cluster_(world_size, setup, {}, each) {}
DistrainRuntime::~DistrainRuntime() = default;

std::vector<at::Tensor> DistrainRuntime::gradients(const Graph& graph) {
  Ops ops(cluster_, graph.table);
  autograd::Context context(cluster_[0]);
  autograd::backward(context, {graph.loss(ops, graph.leaves)});
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& leaf : graph.leaves) gradients.push_back(context.gradient(leaf));
  gradients.push_back(ops.table_gradient(context.id()));
  return gradients;
}

}  // namespace distrain::oracle
