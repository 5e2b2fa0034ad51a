// Compares the gradients of graphs over several ranks with those of the same graph in one process.
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "../rpc/gate.h"
#include "../src/autograd/runtime.h"
#include "distrain/autograd/context.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using base::ErrorKind;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::error_of;

// A namespace of its own, because a unity build joins this file with others.
namespace gradients {

namespace {

constexpr int kRanks = 4;
using Tensors = std::vector<at::Tensor>;

at::Tensor leaf(at::IntArrayRef shape, bool requires_grad = true,
                at::ScalarType dtype = at::kDouble) {
  return at::rand(shape, dtype).requires_grad_(requires_grad);
}
// A 3 × 3 tensor that is not coalesced: one of its values is in two parts.
at::Tensor sparse_leaf(bool requires_grad = true, at::ScalarType dtype = at::kDouble) {
  const at::Tensor indices = at::tensor({0, 1, 1, 1, 2, 0, 2, 2}, at::kLong).view({2, 4});
  return at::sparse_coo_tensor(indices, at::rand({4}, dtype), {3, 3}).requires_grad_(requires_grad);
}
at::Tensor any_leaf(bool sparse, bool requires_grad = true, at::ScalarType dtype = at::kDouble) {
  return sparse ? sparse_leaf(requires_grad, dtype) : leaf({3, 3}, requires_grad, dtype);
}
at::Tensor sum_of(const at::Tensor& tensor) {
  return tensor.is_sparse() ? at::_sparse_sum(tensor) : tensor.sum();
}

std::atomic<bool> g_fails{true};

struct FailsBackward : torch::autograd::Function<FailsBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static Tensors backward(torch::autograd::AutogradContext*, const Tensors& gradients) {
    if (g_fails) throw std::runtime_error("this backward fails");
    return gradients;
  }
};

/// Calls the operation `op` on the rank after that of `call`, or here if `call` is null.
Tensors call_next(rpc::CallContext* call, const std::string& op, const Tensors& args);

Tensors apply(rpc::CallContext* call, const std::string& op, const Tensors& x) {
  if (op == "add") return {x[0] + x[1]};
  if (op == "mul") return {x[0] * x[1]};
  if (op == "div") return {x[0] / x[1]};
  if (op == "cos") return {x[0].cos()};
  if (op == "stack") return {at::stack(x)};
  if (op == "bmm") return {at::bmm(x[0], x[1])};
  if (op == "matmul") return {at::matmul(x[0], x[1])};
  if (op == "multi_dot") return {at::linalg_multi_dot(x)};
  if (op == "split") return x[0].split(2);
  if (op == "fails") return {FailsBackward::apply(x[0] + x[1])};
  if (op == "layers") {
    const at::Tensor t3 = at::linear(x[0], x[1]);
    const at::Tensor t4 = at::linear(x[1], t3), t5 = at::linear(t3, t4);
    return {at::linalg_multi_dot({x[0], x[1], t3, t4, t5})};
  }
  if (op == "mul unless both require a gradient") {
    return {x[1].requires_grad() ? x[0] - x[1] : x[0] * x[1]};
  }
  if (op == "next add") return call_next(call, "add", x);
  if (op == "next fails") {
    const at::Tensor a = x[0] * x[1];
    return {a + call_next(call, "fails", {a, a + x[1]})[0]};
  }
  if (op == "nested") {
    const at::Tensor t3 = x[0] * x[1], t4 = x[0] + x[1];
    return {x[0] * x[1] * t3 * t4 * call_next(call, "add", {t3, t4})[0]};
  }
  throw std::runtime_error("no such operation: " + op);
}
Tensors run(rpc::CallContext& call, const std::string& op, const Tensors& args) {
  return apply(&call, op, args);
}
Tensors call_next(rpc::CallContext* call, const std::string& op, const Tensors& args) {
  if (!call) return apply(nullptr, op, args);
  return call->agent.rpc_sync<&run>((call->agent.rank() + 1) % call->agent.world_size(), op, args);
}

at::Tensor make_leaf(bool sparse) { return any_leaf(sparse); }
at::Tensor add_ref(const RRef<at::Tensor>& ref, const at::Tensor& b) {
  return ref.local_value() + b;
}
at::Tensor add_ref_on(rpc::CallContext& call, int owner, const RRef<at::Tensor>& ref,
                      const at::Tensor& b) {
  return call.agent.rpc_sync<&add_ref>(owner, ref, b);
}
at::Tensor gradient_of(rpc::CallContext& call, const RRef<at::Tensor>& ref, uint64_t context) {
  return autograd::gradient(call.agent, context, ref.local_value());
}
/// Is a trainer of `server`: returns the gradient that its own context has of the server's tensor.
at::Tensor train(rpc::CallContext& call, int server, const RRef<at::Tensor>& ref,
                 const at::Tensor& b) {
  autograd::Context context(call.agent);
  autograd::backward(context, {sum_of(call.agent.rpc_sync<&add_ref>(server, ref, b))});
  const rpc::ContextScope outside(0);
  return call.agent.rpc_sync<&gradient_of>(server, ref, context.id());
}
struct Bag {
  using Constructor = Bag(int64_t rows);
  explicit Bag(int64_t rows) : weight(at::ones({rows, 16}).requires_grad_()) {}
  at::Tensor forward(const at::Tensor& input, const at::Tensor& offsets,
                     const at::Tensor& weights) {
    return std::get<0>(at::embedding_bag(weight, input, offsets, false, 0, true, weights));
  }
  at::Tensor gradient(rpc::CallContext& call, uint64_t context) {
    return autograd::gradient(call.agent, context, weight);
  }
  at::Tensor weight;
};
at::Tensor slow_add(const at::Tensor& a, const at::Tensor& b) {
  testing::wait_at_gate();
  return (a + b).requires_grad_();
}
at::Tensor shared_leaf() {
  static const at::Tensor shared = at::ones({3, 3}, at::kDouble).requires_grad_();
  return shared;
}
at::Tensor gradient_of_shared(rpc::CallContext& call, uint64_t context) {
  return autograd::gradient(call.agent, context, shared_leaf());
}

void prepare(Agent& agent) {
  autograd::install(agent);
  agent.expose<&run>("run");
  agent.expose<&make_leaf>("make_leaf");
  agent.expose<&add_ref>("add_ref");
  agent.expose<&add_ref_on>("add_ref_on");
  agent.expose<&gradient_of>("gradient_of");
  agent.expose<&train>("train");
  agent.expose_class<Bag>("Bag");
  agent.expose<&Bag::forward>("Bag.forward");
  agent.expose<&Bag::gradient>("Bag.gradient");
  agent.expose<&slow_add>("slow_add");
  agent.expose<&shared_leaf>("shared_leaf");
  agent.expose<&gradient_of_shared>("gradient_of_shared");
}

enum class Way { kLocal, kSync, kAsync, kRemote };

/// Calls operations of a graph, each on the next other rank, or all on the calling rank itself.
struct Caller {
  Cluster& cluster;
  Way way;
  bool to_itself = false;
  int last = 0;

  Tensors all(const std::string& op, const Tensors& args) {
    if (way == Way::kLocal) return apply(nullptr, op, args);
    if (!to_itself) last = last % (kRanks - 1) + 1;
    Agent& agent = cluster[0];
    if (way == Way::kRemote) return agent.remote<&run>(last, op, args).to_here();
    if (way == Way::kAsync) return agent.rpc_async<&run>(last, op, args).wait();
    return agent.rpc_sync<&run>(last, op, args);
  }
  at::Tensor operator()(const std::string& op, const Tensors& args) { return all(op, args).at(0); }
};

struct Graph {
  std::string name;
  Tensors leaves;
  std::function<Tensors(Caller&, const Tensors&)> roots;
  int passes = 1;  // over the same graph
};

std::vector<Graph> all_graphs() {
  std::vector<Graph> all;
  const auto one_call = [](const std::string& op) {
    return [op](Caller& call, const Tensors& x) -> Tensors {
      return {sum_of(call(op, {x[0], x[1]}))};
    };
  };
  for (const bool sparse : {false, true}) {
    const auto add = [&](const std::string& name, Tensors leaves, auto roots, int passes = 1) {
      all.push_back({name + (sparse ? ", sparse" : ""), std::move(leaves), roots, passes});
    };
    const auto two = [&] { return Tensors{any_leaf(sparse), any_leaf(sparse)}; };
    add("one call", two(), one_call("add"));
    add("two dtypes", {any_leaf(sparse, true, at::kFloat), any_leaf(sparse, true, at::kDouble)},
        one_call("add"));
    add("a nested call", two(), one_call("nested"));
    add("an argument without gradient", {any_leaf(sparse), any_leaf(sparse, false)},
        one_call("mul unless both require a gradient"));
    add("two passes over one graph", two(), one_call("mul"), 2);
    add("two passes over a nested call", two(), one_call("next add"), 2);
    add("calls to several ranks in turn",
        {any_leaf(sparse), any_leaf(sparse, false), any_leaf(sparse), any_leaf(sparse, false),
         any_leaf(sparse)},
        [sparse](Caller& call, const Tensors& x) -> Tensors {
          const at::Tensor value = call("mul", {x[2], call("add", {x[0], x[1]})});
          const at::Tensor first = call("stack", {x[3], value}),
                           second = call("stack", {x[4], value});
          const at::Tensor product = call(sparse ? "mul" : "bmm", {first, second});
          return {sum_of(call(sparse ? "mul" : "matmul", {product, product}))};
        });
  }
  const auto add = [&](const std::string& name, Tensors leaves, auto roots) {
    all.push_back({name, std::move(leaves), roots, 1});
  };
  add("tensors of different shapes",
      {leaf({4, 6}), leaf({6, 5}, false), leaf({5, 7}), leaf({7, 9}, false)},
      [](Caller& call, const Tensors& x) -> Tensors {
        return {call("multi_dot", {call("matmul", {x[0], x[1]}), x[2], x[3]}).sum()};
      });
  add("a part of a result is unused", {leaf({3, 3}), leaf({3, 3}), leaf({3, 3})},
      [](Caller& call, const Tensors& x) -> Tensors {
        const at::Tensor all_three = call("stack", x);
        return {call("matmul", {all_three.narrow(0, 0, 1), all_three.narrow(0, 2, 1)}).sum()};
      });
  add("some of several results are unused", {leaf({10, 2})},
      [](Caller& call, const Tensors& x) -> Tensors {
        const Tensors parts = call.all("split", {x[0]});
        return {call("multi_dot", {parts[0], parts[2], parts[4]}).sum()};
      });
  add("several roots", {leaf({3, 3}), leaf({3, 3})}, [](Caller& call, const Tensors& x) -> Tensors {
    return {call("add", x).sum(), call("mul", x).sum(), call("cos", {x[0]}).sum(),
            call("div", x).sum()};
  });
  add("a function of several layers", {leaf({3, 3}), leaf({3, 3})}, one_call("layers"));
  add("a leaf with a hook that doubles its gradient", {leaf({3, 3}), leaf({3, 3})},
      one_call("matmul"));
  all.back().leaves[0].register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  add("no call at all", {leaf({3, 3}), leaf({3, 3})},
      [](Caller&, const Tensors& x) -> Tensors { return {(x[0] + x[1]).sum()}; });
  return all;
}

// Returns the gradient of the sum of any_leaf(sparse): 1 for each element that the tensor has.
at::Tensor ones_of(const at::Tensor& leaf) {
  return (leaf.detach().to_dense() != 0).to(at::kDouble);
}

bool is_close(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.layout() == b.layout() &&
         at::allclose(a.to_dense(), b.to_dense());
}

}  // namespace

TEST_CASE("the gradients of a graph over several ranks are those of one process") {
  Cluster cluster(kRanks, prepare);
  for (const Graph& graph : all_graphs()) {
    Tensors wanted;
    for (int pass = 0; pass < graph.passes; ++pass) {
      Caller local{cluster, Way::kLocal};
      torch::autograd::backward(graph.roots(local, graph.leaves), {});
    }
    size_t number = 0;
    for (const at::Tensor& leaf : graph.leaves) {
      wanted.push_back(leaf.grad());
      number += leaf.grad().defined() ? 1 : 0;
      const_cast<at::Tensor&>(leaf).mutable_grad().reset();
    }
    for (const Way way : {Way::kSync, Way::kAsync, Way::kRemote}) {
      for (const bool to_itself : {false, true}) {
        CAPTURE(graph.name, static_cast<int>(way), to_itself);
        autograd::Context context(cluster[0]);
        Caller call{cluster, way, to_itself};
        const Tensors roots = graph.roots(call, graph.leaves);
        for (int pass = 1; pass <= graph.passes; ++pass) {
          autograd::backward(context, roots, {.retain_graph = pass < graph.passes});
        }
        CHECK(context.gradients().size() == number);
        for (size_t i = 0; i < wanted.size(); ++i) {
          CAPTURE(i);
          const at::Tensor gradient = context.gradient(graph.leaves[i]);
          REQUIRE(gradient.defined() == wanted[i].defined());
          if (gradient.defined()) CHECK(is_close(gradient, wanted[i]));
          CHECK_FALSE(graph.leaves[i].grad().defined());
        }
      }
    }
  }
}

TEST_CASE("a pass over a context neither reads nor writes .grad") {
  Cluster cluster(2, prepare);
  for (const bool sparse : {false, true}) {
    const at::Tensor a = any_leaf(sparse), b = any_leaf(sparse);
    autograd::Context context(cluster[0]);
    const at::Tensor loss = sum_of(cluster[0].rpc_sync<&run>(1, "add", Tensors{a, b}).at(0));
    autograd::backward(context, {loss}, {.retain_graph = true});
    for (const at::Tensor& leaf : {a, b}) CHECK_FALSE(leaf.grad().defined());
    sum_of(a + b).backward();
    const Tensors handles{a.grad(), b.grad()}, before{a.grad().clone(), b.grad().clone()};
    autograd::backward(context, {loss});
    for (size_t i = 0; i < 2; ++i) {
      const at::Tensor& leaf = i == 0 ? a : b;
      CHECK(leaf.grad().is_same(handles[i]));
      CHECK(at::equal(leaf.grad().to_dense(), before[i].to_dense()));
      CHECK(at::equal(context.gradient(leaf).to_dense(), 2 * before[i].to_dense()));
    }
  }
}

TEST_CASE("a graph may be passed over a thousand times") {
  Cluster cluster(2, prepare);
  for (const bool sparse : {false, true}) {
    const at::Tensor a = any_leaf(sparse), b = any_leaf(sparse);
    autograd::Context context(cluster[0]);
    const at::Tensor loss = sum_of(cluster[0].rpc_sync<&run>(1, "add", Tensors{a, b}).at(0));
    for (int i = 0; i < 1000; ++i) autograd::backward(context, {loss}, {.retain_graph = true});
    CHECK(at::allclose(context.gradient(b).to_dense(), 1000 * ones_of(b)));
  }
}

TEST_CASE("a tensor that is used through its RRef has its gradient on its owner") {
  Cluster cluster(kRanks, prepare);
  for (const bool sparse : {false, true}) {
    for (const char* const shape :
         {"of the next rank", "of the rank after the next", "of rank 0"}) {
      CAPTURE(sparse, shape);
      const bool nested = shape == std::string("of the rank after the next");
      const bool of_rank_0 = shape == std::string("of rank 0");
      cluster.on_all([&](Agent& agent) {
        if (of_rank_0 && agent.rank() == 0) return;
        const int callee = of_rank_0 ? 0 : (agent.rank() + 1) % kRanks;
        const int owner = nested ? (callee + 1) % kRanks : callee;
        const at::Tensor b = any_leaf(sparse);
        autograd::Context context(agent);
        const RRef<at::Tensor> a = agent.remote<&make_leaf>(owner, sparse);
        const RRef<at::Tensor> result = nested ? agent.remote<&add_ref_on>(callee, owner, a, b)
                                               : agent.remote<&add_ref>(callee, a, b);
        autograd::backward(context, {sum_of(result.to_here())});
        testing::expect(context.gradients().size() == 1, "number of gradients");
        const at::Tensor here = context.gradient(b);
        testing::expect(here.is_sparse() == sparse && at::equal(here.to_dense(), ones_of(b)),
                        "gradient of an argument");
        const rpc::ContextScope outside(0);
        const at::Tensor there = agent.rpc_sync<&gradient_of>(owner, a, context.id());
        testing::expect(there.is_sparse() == sparse && at::equal(there.to_dense(), ones_of(b)),
                        "gradient on the owner");
      });
    }
  }
}

TEST_CASE("each rank may be a parameter server of the others, with a gradient for each context") {
  Cluster cluster(kRanks, prepare);
  for (const bool sparse : {false, true}) {
    cluster.on_all([&](Agent& agent) {
      const RRef<at::Tensor> a = agent.remote<&make_leaf>(agent.rank(), sparse);
      const at::Tensor b = any_leaf(sparse);
      std::vector<base::Future<at::Tensor>> trainers;
      for (int i = 1; i < kRanks; ++i) {
        trainers.push_back(
            agent.rpc_async<&train>((agent.rank() + i) % kRanks, agent.rank(), a, b));
      }
      const at::Tensor wanted = ones_of(b);
      for (auto& trainer : trainers) {
        testing::expect(at::equal(trainer.wait().to_dense(), wanted), "gradient of a trainer");
      }
    });
  }
}

TEST_CASE("a result that requires a gradient by itself has its gradient where it was returned") {
  Cluster cluster(2, prepare);
  for (const bool remote : {false, true}) {
    autograd::Context context(cluster[0]);
    const at::Tensor result = remote ? cluster[0].remote<&shared_leaf>(1).to_here()
                                     : cluster[0].rpc_sync<&shared_leaf>(1);
    autograd::backward(context, {result.sum()});
    CHECK(context.gradients().empty());
    CHECK(autograd::Runtime::of(cluster[1])->find(context.id())->gradients().size() == 1);
    const rpc::ContextScope outside(0);
    CHECK(at::equal(cluster[0].rpc_sync<&gradient_of_shared>(1, context.id()),
                    at::ones({3, 3}, at::kDouble)));
  }
}

TEST_CASE("an embedding bag's sparse gradients add up on its rank, with weights for each row") {
  Cluster cluster(2, prepare);
  const at::Tensor input = at::tensor({1, 2, 4, 5, 4, 3, 2, 9}, at::kLong);
  const at::Tensor offsets = at::tensor({0, 4}, at::kLong);
  const at::Tensor weights = at::rand({8}).requires_grad_();
  Bag local(16);
  const at::Tensor here = local.forward(input, offsets, weights).sum();
  torch::autograd::backward({here}, {}, true);
  torch::autograd::backward({here}, {});
  const RRef<Bag> bag = cluster[0].remote_new<Bag>(1, 16);
  autograd::Context context(cluster[0]);
  const at::Tensor there = bag.rpc_sync<&Bag::forward>(input, offsets, weights).sum();
  autograd::backward(context, {there}, {.retain_graph = true});
  autograd::backward(context, {there});
  const rpc::ContextScope outside(0);
  const at::Tensor gradient = bag.rpc_sync<&Bag::gradient>(context.id());
  REQUIRE(gradient.is_sparse());
  CHECK(at::equal(gradient.to_dense(), local.weight.grad().to_dense()));
  CHECK(at::equal(context.gradient(weights), weights.grad()));
}

TEST_CASE("an error in a backward function names the rank where it happened, however deep") {
  Cluster cluster(kRanks, prepare);
  g_fails = true;
  const at::Tensor a = leaf({3, 3}), b = leaf({3, 3});
  const auto check = [&](int rank, const std::function<at::Tensor(Caller&)>& loss) {
    CAPTURE(rank);
    autograd::Context context(cluster[0]);
    Caller call{cluster, Way::kSync};
    const at::Tensor root = loss(call);
    const base::Error error = error_of([&] { autograd::backward(context, {root}); });
    CHECK(error.rank == rank);
    CHECK(error.message.find("this backward fails") != std::string::npos);
    CHECK(error.op == "backward");
  };
  // Gradients pass through ranks 3, 2 and 1 before the error.
  check(0, [&](Caller& call) {
    const at::Tensor t3 = FailsBackward::apply((a + b) * (a + b));
    const at::Tensor first = call("mul", {call("add", {b, t3}), b});
    return call("div", {call("matmul", {first, b}), b}).sum();
  });
  check(1, [&](Caller& call) { return call("fails", {a, b}).sum(); });
  check(2, [&](Caller& call) { return call("next fails", {a, b}).sum(); });
}

TEST_CASE("a pass that fails fifty times succeeds when the cause is gone") {
  Cluster cluster(2, prepare);
  const at::Tensor a = leaf({3, 3}), b = leaf({3, 3});
  autograd::Context context(cluster[0]);
  const at::Tensor loss = cluster[0].rpc_sync<&run>(1, "fails", Tensors{a, b}).at(0).sum();
  for (int i = 0; i < 100; ++i) {
    g_fails = i < 50;
    const std::string message =
        error_of([&] { autograd::backward(context, {loss}, {.retain_graph = true}); }).message;
    CHECK((message.find("this backward fails") != std::string::npos) == (i < 50));
  }
  g_fails = true;
  CHECK(at::allclose(context.gradient(a), at::full({3, 3}, 50.0, at::kDouble)));
}

TEST_CASE("a rank at the end of nested calls that dies fails the pass on the first rank") {
  const bool nested = GENERATE(false, true);
  Cluster cluster(kRanks, prepare);
  const at::Tensor a = leaf({3, 3}), b = leaf({3, 3});
  autograd::Context context(cluster[0]);
  const std::string op = nested ? "next add" : "add";
  const at::Tensor loss = cluster[0].rpc_sync<&run>(1, op, Tensors{a, b}).at(0).sum();
  cluster.kill(nested ? 2 : 1);
  cluster.kill(3);
  const base::Error error = error_of([&] { autograd::backward(context, {loss}); });
  CHECK(error.kind == ErrorKind::kPeerLost);
}

TEST_CASE("roots that cannot be passed over are refused in one line") {
  Cluster cluster(2, prepare);
  autograd::Context context(cluster[0]);
  const auto message_of = [&](const Tensors& roots) {
    const base::Error error = error_of([&] { autograd::backward(context, roots); });
    CHECK(error.kind == ErrorKind::kInvalid);
    return error.message;
  };
  CHECK(message_of({}) == "backward: there is no root");
  CHECK(message_of({at::rand({3})}) == "backward: a root does not require a gradient");
  CHECK(message_of({at::Tensor()}) == "backward: a root does not require a gradient");
}

TEST_CASE("a root may have many elements, and may be a leaf") {
  Cluster cluster(2, prepare);
  autograd::Context context(cluster[0]);
  const at::Tensor a = leaf({3, 3}), b = leaf({1});
  autograd::backward(context, {cluster[0].rpc_sync<&run>(1, "add", Tensors{a, a}).at(0), b});
  CHECK(at::equal(context.gradient(a), at::full({3, 3}, 2.0, at::kDouble)));
  CHECK(at::equal(context.gradient(b), at::ones({1}, at::kDouble)));
}

TEST_CASE("a context that is released on all ranks during its pass leaves nothing behind") {
  Cluster cluster(kRanks, prepare);
  at::Tensor value = leaf({3, 3});
  auto context = std::make_unique<autograd::Context>(cluster[0]);
  Caller call{cluster, Way::kSync};
  for (int i = 0; i < 100; ++i) value = call("add", {value, value}) / 2;
  CHECK(context->state()->sends().size() == 100);
  const auto runtime = autograd::Runtime::of(cluster[0]);
  const auto no_context = [&] {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (cluster[rank].live_contexts() > 0) return false;
    }
    return true;
  };
  const auto wait = [&] {
    const auto deadline = std::chrono::steady_clock::now() + 60s;
    while (!no_context() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(1ms);
    }
    return no_context();
  };
  bool ended = false;
  value.register_hook([&](const at::Tensor&) {
    runtime->release(context->id());
    ended = wait();
  });
  const base::Error error = error_of([&] { autograd::backward(*context, {value.sum()}); });
  CHECK(error.message.find("a context that has ended") != std::string::npos);
  CHECK(ended);
  context.reset();
  CHECK(wait());
  autograd::Context next(cluster[0]);  // the ranks work on
  const at::Tensor a = leaf({3, 3});
  autograd::backward(next, {cluster[0].rpc_sync<&run>(1, "add", Tensors{a, a}).at(0).sum()});
  CHECK(next.gradient(a).defined());
}

TEST_CASE("threads of three ranks pass over graphs on one rank concurrently") {
  Cluster cluster(kRanks, prepare);
  cluster.on_all([&](Agent& agent) {
    if (agent.rank() == 0) return;
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int i = 0; i < 20; ++i) {
      threads.emplace_back([&] {
        const auto call = [&](const char* op, const at::Tensor& x, const at::Tensor& y) {
          return agent.rpc_sync<&run>(0, op, Tensors{x, y}).at(0);
        };
        const at::Tensor t1 = at::rand({3, 3}, at::kDouble).requires_grad_();
        const at::Tensor t2 = at::rand({3, 3}, at::kDouble).requires_grad_();
        const at::Tensor l3 = t1 + t2, l4 = t2 * l3;
        const auto wanted = torch::autograd::grad({(l4 + at::matmul(l3, l4)).sum()}, {t1, t2});
        autograd::Context context(agent);
        const at::Tensor t3 = call("add", t1, t2), t4 = call("mul", t2, t3);
        autograd::backward(context, {call("add", t4, call("matmul", t3, t4)).sum()});
        if (is_close(context.gradient(t1), wanted[0]) &&
            is_close(context.gradient(t2), wanted[1])) {
          ++right;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    testing::expect(right == 20, "gradients of concurrent passes");
  });
}

TEST_CASE("a call from outside of a context may be fetched in one, and has its gradient there") {
  testing::g_gate = false;
  Cluster cluster(2, prepare);
  const at::Tensor a = at::rand({3, 3}, at::kDouble), b = at::rand({3, 3}, at::kDouble);
  const RRef<at::Tensor> added = cluster[0].remote<&slow_add>(1, a, b);
  autograd::Context context(cluster[0]);
  base::Future<at::Tensor> fetched = added.to_here_async();
  testing::wait_for_call_at_gate();
  testing::g_gate = true;
  autograd::backward(context, {fetched.wait().sum()});
  const rpc::ContextScope outside(0);
  CHECK(at::equal(cluster[0].rpc_sync<&gradient_of>(1, added, context.id()),
                  at::ones({3, 3}, at::kDouble)));
}

TEST_CASE("a leaf that is used twice calls each of its post hooks once") {
  Cluster cluster(2, prepare);
  const at::Tensor t = leaf({10, 10}), twice = t + t;
  int calls = 0;
  const auto add_hook = [&](size_t edge, int number) {
    twice.grad_fn()->next_edge(edge).function->add_post_hook(
        std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [&calls, number](const Tensors& outputs, const Tensors&) -> Tensors {
              calls += number;
              return outputs;
            }));
  };
  add_hook(0, 1);
  add_hook(0, 10);
  add_hook(1, 100);  // of the same node
  autograd::Context context(cluster[0]);
  autograd::backward(context, {twice.sum()});
  CHECK(calls == 111);
  CHECK(context.gradients().size() == 1);
  CHECK(context.gradient(t).defined());
}

}  // namespace gradients
