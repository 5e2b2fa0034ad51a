// Tests which nodes calls record on each rank, and which ranks take part in a context.
#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "../src/autograd/runtime.h"
#include "distrain/autograd/context.h"
#include "distrain/base/trace.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using autograd::ContextState;
using autograd::RecvNode;
using autograd::Runtime;
using autograd::SendNode;
using rpc::Agent;
using testing::Cluster;
using testing::error_of;
using torch::autograd::Edge;
using torch::autograd::Node;

// A namespace of its own, because a unity build joins this file with others.
namespace call_graphs {

namespace {

constexpr int kRanks = 4;

// A function of torch, exposed as it is, and one of the test's.
constexpr auto kTorchMul =
    static_cast<at::Tensor (*)(const at::Tensor&, const at::Tensor&)>(&at::mul);
at::Tensor mul(const at::Tensor& a, const at::Tensor& b) { return a * b; }
at::Tensor stack(const std::vector<at::Tensor>& tensors) { return at::stack(tensors); }
// Calls g_observe() in the backward pass.
std::function<void()> g_observe;
at::Tensor observed_mul(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor product = a * b;
  product.register_hook([](const at::Tensor&) { g_observe(); });
  return product;
}
int64_t add_numbers(int64_t a, int64_t b) { return a + b; }
at::Tensor fail(const at::Tensor& a, const at::Tensor& b) { return at::matmul(a, b); }
// Calls mul() on the rank after the last of `hops` further ranks.
at::Tensor nested(rpc::CallContext& call, const at::Tensor& a, const at::Tensor& b, int to,
                  int hops) {
  const int next = (to + 1) % call.agent.world_size();
  if (hops == 0) return call.agent.rpc_sync<&mul>(to, a, b);
  return call.agent.rpc_sync<&nested>(to, a, b, next, hops - 1);
}

void set_up(Agent& agent) {
  autograd::install(agent);
  agent.expose<kTorchMul>("torch.mul");
  agent.expose<&mul>("mul");
  agent.expose<&observed_mul>("observed_mul");
  agent.expose<&stack>("stack");
  agent.expose<&add_numbers>("add_numbers");
  agent.expose<&fail>("fail");
  agent.expose<&nested>("nested");
}

at::Tensor leaf(bool sparse, bool requires_grad = true) {
  if (!sparse) return at::rand({3, 3}, at::kDouble).requires_grad_(requires_grad);
  const at::Tensor indices = at::tensor({0, 1, 1, 2, 0, 2}, at::kLong).view({2, 3});
  return at::sparse_coo_tensor(indices, at::rand({3}, at::kDouble), {3, 3})
      .requires_grad_(requires_grad);
}

std::shared_ptr<ContextState> state_on(Cluster& cluster, int rank, uint64_t id) {
  return Runtime::of(cluster[rank])->find(id);
}

// Returns the only send node to `to` that holds arguments, or the answer to a call.
const SendNode& sent(const ContextState& state, int to, bool is_answer) {
  std::shared_ptr<SendNode> found;
  for (const auto& send : state.sends()) {
    if (send->to != to || (send->answered != 0) != is_answer) continue;
    REQUIRE_FALSE(found);
    found = send;
  }
  REQUIRE(found);
  return *found;
}

// Returns the next node. A sparse tensor travels as its values, so its graph has nodes between the
// send or receive node and the sparse tensor: those with one edge are skipped.
Node* behind(const Node* node, bool sparse) {
  const auto is_end = [](const Node* each) {
    return dynamic_cast<const RecvNode*>(each) ||
           dynamic_cast<const torch::autograd::AccumulateGrad*>(each) || each->num_outputs() != 1;
  };
  while (sparse && !is_end(node)) node = node->next_edge(0).function.get();
  return const_cast<Node*>(node);
}

// Checks that all next nodes of `node` are one receive node, for tensors from rank `from`.
void check_received(const Node& node, size_t edges, int from, bool sparse) {
  REQUIRE(node.num_outputs() == edges);
  std::set<const Node*> received;
  for (const Edge& edge : node.next_edges()) {
    const auto* recv = dynamic_cast<const RecvNode*>(behind(edge.function.get(), sparse));
    REQUIRE(recv);
    CHECK(recv->from == from);
    received.insert(recv);
  }
  CHECK(received.size() == 1);
}

// Checks that the next nodes of `send` collect the gradients of `leaves`.
void check_leaves(const SendNode& send, const std::vector<at::Tensor>& leaves) {
  REQUIRE(send.num_outputs() == leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Edge& edge = send.next_edge(i);
    CHECK(edge.input_nr == 0);
    Node* const node = behind(edge.function.get(), leaves[i].is_sparse());
    auto* const accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
    REQUIRE(accumulate);
    CHECK(accumulate->variable.is_same(leaves[i]));
  }
}

void check_result(const at::Tensor& result, int from) {
  const Node* const node = behind(result.grad_fn().get(), result.is_sparse());
  const auto* recv = dynamic_cast<const RecvNode*>(node);
  REQUIRE(recv);
  CHECK(recv->from == from);
}

// Checks a rank that received two tensors from `caller`, multiplied them and sent the product back.
void check_multiplied(const ContextState& state, int caller, bool sparse) {
  const SendNode& answer = sent(state, caller, true);
  REQUIRE(answer.num_outputs() == 1);
  const Node& product = *behind(answer.next_edge(0).function.get(), sparse);
  CHECK(product.name() == "MulBackward0");
  check_received(product, 2, caller, sparse);
}

// Checks a rank that passed two tensors from `caller` on to `callee`, and the result back.
void check_passed_on(const ContextState& state, int caller, int callee, bool sparse) {
  CHECK(state.sends().size() == 2);
  check_received(sent(state, callee, false), 2, caller, sparse);
  check_received(sent(state, caller, true), 1, callee, sparse);
}

template <class Condition>
bool becomes_true(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (!condition() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(1ms);
  }
  return condition();
}

void check_ended(Cluster& cluster) {
  for (int rank = 0; rank < cluster.size(); ++rank) {
    CHECK(becomes_true([&] { return cluster[rank].live_contexts() == 0; }));
  }
}

}  // namespace

TEST_CASE("a call records one send and one receive node on each of its two ranks") {
  Cluster cluster(kRanks, set_up);
  const bool sparse = GENERATE(false, true);
  const bool remote = GENERATE(false, true);
  const bool of_torch = GENERATE(false, true);
  CAPTURE(sparse, remote, of_torch);
  const at::Tensor a = leaf(sparse), b = leaf(sparse);
  std::optional<autograd::Context> context(cluster[0]);
  Agent& agent = cluster[0];
  const at::Tensor result =
      of_torch ? (remote ? agent.remote<kTorchMul>(1, a, b).to_here()
                         : agent.rpc_sync<kTorchMul>(1, a, b))
               : (remote ? agent.remote<&mul>(1, a, b).to_here() : agent.rpc_sync<&mul>(1, a, b));
  const uint64_t id = context->id();
  CHECK(rpc::current_context() == id);
  REQUIRE(context->state()->sends().size() == 1);
  check_leaves(sent(*context->state(), 1, false), {a, b});
  check_result(result, 1);
  const auto callee = state_on(cluster, 1, id);
  REQUIRE(callee);
  REQUIRE(callee->sends().size() == 1);
  check_multiplied(*callee, 0, sparse);
  CHECK_FALSE(state_on(cluster, 2, id));

  context.reset();
  CHECK(rpc::current_context() == 0);
  CHECK_FALSE(state_on(cluster, 0, id));
  check_ended(cluster);
}

TEST_CASE("nested calls record two send nodes on each rank that passes tensors on") {
  Cluster cluster(kRanks, set_up);
  const bool sparse = GENERATE(false, true);
  const bool remote = GENERATE(false, true);
  CAPTURE(sparse, remote);
  const at::Tensor a = leaf(sparse), b = leaf(sparse);
  const auto call = [&](int to, int hops) {
    return remote ? cluster[0].remote<&nested>(1, a, b, to, hops).to_here()
                  : cluster[0].rpc_sync<&nested>(1, a, b, to, hops);
  };
  {
    // rank 0 → 1 → 2 → 3
    const autograd::Context context(cluster[0]);
    const at::Tensor result = call(2, 1);
    const auto on = [&](int rank) { return state_on(cluster, rank, context.id()); };
    REQUIRE(on(0)->sends().size() == 1);
    check_leaves(sent(*on(0), 1, false), {a, b});
    check_result(result, 1);
    check_passed_on(*on(1), 0, 2, sparse);
    check_passed_on(*on(2), 1, 3, sparse);
    REQUIRE(on(3)->sends().size() == 1);
    check_multiplied(*on(3), 2, sparse);
  }
  {
    // rank 0 → 1 → 0
    const autograd::Context context(cluster[0]);
    const at::Tensor result = call(0, 0);
    REQUIRE(context.state()->sends().size() == 2);
    check_leaves(sent(*context.state(), 1, false), {a, b});
    check_multiplied(*context.state(), 1, sparse);
    check_result(result, 1);
    check_passed_on(*state_on(cluster, 1, context.id()), 0, 0, sparse);
  }
  check_ended(cluster);
}

TEST_CASE("tensors that need no gradient record no node, but their call joins the context") {
  Cluster cluster(2, set_up);
  const bool sparse = GENERATE(false, true);
  const bool remote = GENERATE(false, true);
  const at::Tensor a = leaf(sparse, false), b = leaf(sparse, false);
  const autograd::Context context(cluster[0]);
  const at::Tensor result = remote ? cluster[0].remote<kTorchMul>(1, a, b).to_here()
                                   : cluster[0].rpc_sync<kTorchMul>(1, a, b);
  CHECK_FALSE(result.requires_grad());
  CHECK(context.state()->sends().empty());
  const auto callee = state_on(cluster, 1, context.id());
  REQUIRE(callee);
  CHECK(callee->sends().empty());
}

TEST_CASE("of a list of tensors those that require a gradient are recorded") {
  Cluster cluster(3, set_up);
  const bool sparse = GENERATE(false, true);
  const bool remote = GENERATE(false, true);
  std::vector<at::Tensor> tensors, trained;
  for (int i = 0; i < 10; ++i) {
    tensors.push_back(leaf(sparse, i % 2 == 0));
    if (i % 2 == 0) trained.push_back(tensors.back());
  }
  const autograd::Context context(cluster[0]);
  const at::Tensor result = remote ? cluster[0].remote<&stack>(1, tensors).to_here()
                                   : cluster[0].rpc_sync<&stack>(1, tensors);
  CHECK(at::equal(result.detach().to_dense(), at::stack(tensors).detach().to_dense()));
  REQUIRE(context.state()->sends().size() == 1);
  check_leaves(sent(*context.state(), 1, false), trained);
  CHECK(context.state()->participants() == std::set<int>{1});
}

TEST_CASE("the ranks that a context has called are its participants, with and without gradients") {
  Cluster cluster(kRanks, set_up);
  const autograd::Context context(cluster[0]);
  for (const bool requires_grad : {false, true}) {
    for (int rank = 1; rank < kRanks; ++rank) {
      cluster[0].rpc_sync<&mul>(rank, leaf(false, requires_grad), leaf(false, requires_grad));
    }
    CHECK(context.state()->participants() == std::set<int>{1, 2, 3});
  }
}

TEST_CASE("a context ends on all ranks that its calls have reached") {
  Cluster cluster(kRanks, set_up);
  struct Row {
    const char* name;
    std::function<void(int to)> call;
    int contexts;  // number of ranks that know the context
  };
  std::vector<Row> rows{
      {"no tensor", [&](int to) { cluster[0].rpc_sync<&add_numbers>(to, 1, 1); }, 4}};
  for (const bool sparse : {false, true}) {
    for (const bool requires_grad : {false, true}) {
      rows.push_back({"tensors",
                      [&cluster, sparse, requires_grad](int to) {
                        const at::Tensor a = leaf(sparse, requires_grad);
                        cluster[0].rpc_sync<&mul>(to, a, a);
                      },
                      4});
    }
    rows.push_back({"nested",
                    [&cluster, sparse](int to) {
                      if (to == 1)
                        cluster[0].rpc_sync<&nested>(1, leaf(sparse), leaf(sparse), 2, 0);
                    },
                    3});
  }
  for (const Row& row : rows) {
    CAPTURE(row.name);
    {
      const autograd::Context context(cluster[0]);
      for (int to = 1; to < kRanks; ++to) row.call(to);
      int known = 0;
      for (int rank = 0; rank < kRanks; ++rank)
        known += state_on(cluster, rank, context.id()) ? 1 : 0;
      CHECK(known == row.contexts);
    }
    CHECK(rpc::current_context() == 0);
    check_ended(cluster);
  }
}

TEST_CASE("a context's id names the rank that created it, and is unknown once it has ended") {
  Cluster cluster(2, set_up);
  std::set<uint64_t> ids;
  for (int i = 0; i < 200; ++i) {
    const int rank = i % 2;
    const autograd::Context context(cluster[rank]);
    CHECK(state_on(cluster, rank, context.id())->id() == context.id());
    CHECK(rpc::maker_of(context.id()) == rpc::process_number(rank + 1, 0));
    ids.insert(context.id());
  }
  CHECK(ids.size() == 200);
  for (const uint64_t id : ids) {
    for (int rank = 0; rank < 2; ++rank) CHECK_FALSE(state_on(cluster, rank, id));
  }
}

TEST_CASE("calls on an id that is no context's, or that of an ended one, are refused") {
  Cluster cluster(2, set_up);
  uint64_t ended = 0;
  {
    const autograd::Context context(cluster[0]);
    ended = context.id();
    const at::Tensor a = leaf(false);
    const at::Tensor product = cluster[0].rpc_sync<&mul>(1, a, a);
    autograd::Context other(cluster[0]);
    // The roots depend on a tensor of another context than the one that the pass is over.
    const base::Error error = error_of([&] { autograd::backward(other, {product.sum()}); });
    CHECK(error.kind == base::ErrorKind::kInvalid);
    CHECK(error.message.find("in another context") != std::string::npos);
  }
  const at::Tensor a = leaf(false), outside = cluster[0].rpc_sync<&mul>(1, a, a).sum() + a.sum();
  const autograd::Context source(cluster[0]);
  for (const uint64_t id : {uint64_t{100}, ended}) {
    const base::Error unknown = error_of([&] { autograd::backward(cluster[0], id, {outside}); });
    CHECK(unknown.kind == base::ErrorKind::kInvalid);
    CHECK(unknown.message == "backward: this rank has no autograd context " + std::to_string(id));
    CHECK_FALSE(autograd::gradient(cluster[0], id, leaf(false)).defined());
    CHECK(error_of([&] { autograd::move_gradients(cluster[0], source.id(), id); }).kind ==
          base::ErrorKind::kInvalid);
  }
  CHECK(error_of([&] { autograd::attach(cluster[0], ended, &cluster, nullptr); }).kind ==
        base::ErrorKind::kInvalid);
  // A rank that has a part of a context cannot begin its passes, but the rank that created it can.
  const at::Tensor product = cluster[0].rpc_sync<&mul>(1, a, a).sum();
  CHECK(error_of([&] { autograd::backward(cluster[1], source.id(), {product}); }).kind ==
        base::ErrorKind::kInvalid);
  autograd::backward(cluster[0], source.id(), {product});
  CHECK(at::allclose(source.gradient(a), 2 * a.detach()));
}

TEST_CASE("contexts of one thread may be nested, and calls belong to the inner one") {
  Cluster cluster(2, set_up);
  const at::Tensor a = leaf(false);
  autograd::Context outer(cluster[0]);
  {
    autograd::Context inner(cluster[0]);
    autograd::backward(inner, {cluster[0].rpc_sync<&mul>(1, a, a).sum()});
    CHECK(inner.gradients().size() == 1);
    CHECK(outer.state()->sends().empty());
  }
  autograd::backward(outer, {cluster[0].rpc_sync<&mul>(1, a, a).sum()});
  CHECK(at::allclose(outer.gradient(a), 2 * a.detach()));
}

TEST_CASE("a call that fails throws its error and leaves its context usable") {
  Cluster cluster(2, set_up);
  autograd::Context context(cluster[0]);
  const at::Tensor a = leaf(false);
  const base::Error error = error_of([&] {
    cluster[0].rpc_sync<&fail>(1, a, at::rand({6, 6}, at::kDouble));
  });
  CHECK(error.rank == 1);
  CHECK(error.message.find("cannot be multiplied") != std::string::npos);
  autograd::backward(context, {cluster[0].rpc_sync<&mul>(1, a, a).sum()});
  CHECK(at::allclose(context.gradient(a), 2 * a.detach()));
}

TEST_CASE("a trace shows a pass, and within it the messages with gradients, on each rank") {
  std::vector<std::shared_ptr<base::Tracer>> tracers;
  Cluster cluster(2, set_up, {}, [&](rpc::AgentOptions& options) {
    options.tracer = tracers.emplace_back(std::make_shared<base::Tracer>());
  });
  const at::Tensor a = leaf(false), b = leaf(false);
  autograd::Context context(cluster[0]);
  const at::Tensor loss = cluster[0].rpc_sync<&mul>(1, a, b).sum();
  for (const auto& tracer : tracers) tracer->start();
  {
    const base::TraceBinding binding(tracers[0], "main");
    autograd::backward(context, {loss});
  }
  for (int rank = 0; rank < 2; ++rank) {
    CAPTURE(rank);
    tracers[static_cast<size_t>(rank)]->stop();
    REQUIRE(tracers[static_cast<size_t>(rank)]->wait_until_closed(60s));
    std::vector<base::TraceEvent> passes, messages;
    for (const auto& track : tracers[static_cast<size_t>(rank)]->tracks()) {
      for (const base::TraceEvent& event : track.events) {
        if (std::string(event.name) == "backward") passes.push_back(event);
        if (std::string(event.name).find(autograd::kGradientsFunction) != std::string::npos &&
            event.kind != base::TraceEvent::Kind::kAsync) {
          messages.push_back(event);
        }
      }
    }
    // Rank 0 sends gradients of the result, and receives those of its arguments.
    CHECK(passes.size() == (rank == 0 ? 2 : 1));
    REQUIRE(messages.size() == 2);
    for (const base::TraceEvent& message : messages) {
      const bool is_sent = message.kind == base::TraceEvent::Kind::kFlowOut;
      CHECK(std::ranges::any_of(passes, [&](const base::TraceEvent& pass) {
        const auto& [outer, inner] = is_sent ? std::pair(pass, message) : std::pair(message, pass);
        return outer.start <= inner.start && inner.end <= outer.end;
      }));
    }
    CHECK(messages[0].kind != messages[1].kind);
  }
}

TEST_CASE("a rank in a backward pass reports the ranks that it waits for") {
  Cluster cluster(2, set_up);
  {
    autograd::Context context(cluster[0]);
    const at::Tensor a = leaf(false);
    std::vector<rpc::Wait> waits;
    const auto info = [&](int rank, const char* name) { return cluster[rank].info().at(name); };
    g_observe = [&] {
      waits = cluster[0].waits();
      for (int rank = 0; rank < 2; ++rank) CHECK(info(rank, "passes") == 1);
    };
    const at::Tensor loss = cluster[0].rpc_sync<&observed_mul>(1, a, a).sum();
    CHECK(cluster[0].waits().empty());
    autograd::backward(context, {loss});
    REQUIRE(waits.size() == 1);
    CHECK(waits[0].what == std::string(autograd::kGradientsFunction) + ", called on rank 1");
    CHECK(cluster[0].waits().empty());
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(info(rank, "contexts") == 1);
      CHECK(info(rank, "passes") == 0);
    }
  }
  check_ended(cluster);
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(cluster[rank].info().at("contexts") == 0);
    CHECK(cluster[rank].info().at("passes") == 0);
  }
  g_observe = {};
}

}  // namespace call_graphs
