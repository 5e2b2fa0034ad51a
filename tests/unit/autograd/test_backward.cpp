#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

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

namespace {

at::Tensor leaf(at::Tensor t) { return t.to(at::kDouble).requires_grad_(); }

at::Tensor mul(at::Tensor a, at::Tensor b) { return a * b; }
at::Tensor identity(at::Tensor a) { return a; }
at::Tensor wasteful(rpc::CallContext& context, at::Tensor a) {
  static_cast<void>(context.agent.rpc_sync<&mul>(context.agent.rank(), a, a));
  return a * 2;
}
at::Tensor to_dense(at::Tensor a) { return a.to_dense(); }
std::tuple<at::Tensor, at::Tensor> split(at::Tensor a) { return {a.sin(), a.cos()}; }
// Calls the caller back while its call is in progress: A → B → A.
at::Tensor there_and_back(rpc::CallContext& context, at::Tensor a) {
  const at::Tensor b = context.agent.rpc_sync<&mul>(context.caller, a, a + 1);
  return b.exp();
}
at::Tensor fail_in_backward(at::Tensor a);
at::Tensor times_ref(at::Tensor a, const RRef<at::Tensor>& ref) { return a * ref.to_here(); }
at::Tensor get_parameter(const RRef<at::Tensor>& ref) { return ref.local_value(); }
at::Tensor around(rpc::CallContext& context, at::Tensor a, int hops) {
  if (hops == 0) return a * 2;
  const int next = (context.agent.rank() + 1) % context.agent.world_size();
  return context.agent.rpc_sync<&around>(next, a.sin(), hops - 1) + a;
}

struct Scale {
  using Constructor = Scale(at::Tensor w);
  explicit Scale(at::Tensor w) : weight(w.clone().requires_grad_()) {}
  at::Tensor forward(at::Tensor x) { return x * weight; }
  at::Tensor gradient(rpc::CallContext& context, uint64_t id) {
    return autograd::gradient(context.agent, id, weight);
  }
  RRef<at::Tensor> parameter(rpc::CallContext& context) { return context.agent.make_rref(weight); }
  void break_hook() {
    accumulator = torch::autograd::impl::grad_accumulator(weight);
    accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [](const torch::autograd::variable_list&, const torch::autograd::variable_list&)
            -> torch::autograd::variable_list { throw std::runtime_error("post hook broke"); }));
  }
  at::Tensor weight;
  std::shared_ptr<torch::autograd::Node> accumulator;
};

struct GivesNoGradient : torch::autograd::Function<GivesNoGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
  }
};

std::atomic<int> g_told{0};
at::Tensor mul_guarded(rpc::CallContext& context, at::Tensor a) {
  autograd::PassGuard guard;
  guard.on_failure = [](const base::Error& error) {
    if (error.kind == ErrorKind::kBadData && error.rank == 1) ++g_told;
  };
  autograd::guard_pass(context.agent, std::move(guard));
  return a * 2;
}

// An addition that gives both inputs a sparse gradient for row 1. The two gradients share their
// tensor of values if `share_values` is true, and otherwise their tensor of indices.
struct GivesSharedRows : torch::autograd::Function<GivesSharedRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& y, bool share_values) {
    context->saved_data["share_values"] = share_values;
    return x + y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    const at::Tensor indices = at::ones({1, 1}, at::kLong);
    const at::Tensor values = at::full({1, 2}, 2.0, at::kDouble);
    const auto rows = [](const at::Tensor& numbers, const at::Tensor& of_rows) {
      return at::sparse_coo_tensor(numbers, of_rows, {4, 2});
    };
    if (context->saved_data["share_values"].toBool()) {
      return {rows(indices, values), rows(indices.clone(), values), at::Tensor()};
    }
    return {rows(indices, values), rows(indices, values.clone()), at::Tensor()};
  }
};

void setup(Agent& agent) {
  autograd::install(agent);
  agent.expose<&mul>("mul");
  agent.expose<&identity>("identity");
  agent.expose<&wasteful>("wasteful");
  agent.expose<&to_dense>("to_dense");
  agent.expose<&mul_guarded>("mul_guarded");
  agent.expose<&split>("split");
  agent.expose<&there_and_back>("there_and_back");
  agent.expose<&fail_in_backward>("fail_in_backward");
  agent.expose<&times_ref>("times_ref");
  agent.expose<&get_parameter>("get_parameter");
  agent.expose<&around>("around");
  agent.expose_class<Scale>("Scale");
  agent.expose<&Scale::forward>("Scale.forward");
  agent.expose<&Scale::gradient>("Scale.gradient");
  agent.expose<&Scale::parameter>("Scale.parameter");
  agent.expose<&Scale::break_hook>("Scale.break_hook");
}

at::Tensor fail_in_backward(at::Tensor a) {
  const at::Tensor b = a * 2;
  b.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("hook broke"); });
  return b * 3;
}

// Returns the gradients of `leaves` from a local backward pass of `loss`, and resets their .grad.
std::vector<at::Tensor> local_gradients(const at::Tensor& loss,
                                        const std::vector<at::Tensor>& leaves) {
  loss.backward();
  std::vector<at::Tensor> grads;
  for (const at::Tensor& l : leaves) {
    grads.push_back(l.grad().clone());
    const_cast<at::Tensor&>(l).mutable_grad().reset();
  }
  return grads;
}

void check_no_leaks(Cluster& cluster) {
  cluster.shutdown();
  for (int rank = 0; rank < cluster.size(); ++rank) {
    CHECK(cluster[rank].live_contexts() == 0);
    CHECK(cluster[rank].live_rrefs() == 0);
  }
}

}  // namespace

TEST_CASE("gradients pass through one remote call, also to the calling rank itself") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::rand({2, 3})), b = leaf(at::rand({2, 3}));
  for (int to : {0, 1}) {
    const auto expected = local_gradients((a * b).sin().sum(), {a, b});
    autograd::Context context(cluster[0]);
    const at::Tensor y = cluster[0].rpc_sync<&mul>(to, a, b);
    autograd::backward(context, {y.sin().sum()});
    CHECK(at::equal(context.gradient(a), expected[0]));
    CHECK(at::equal(context.gradient(b), expected[1]));
    CHECK_FALSE(a.grad().defined());
    CHECK(context.gradients().size() == 2);
  }
  check_no_leaks(cluster);
}

TEST_CASE("gradients are sparse tensors, as arguments and as results") {
  Cluster cluster(2, setup);
  const at::Tensor indices = at::tensor({2, 0, 2}, at::kLong).unsqueeze(0);
  const bool coalesced = GENERATE(false, true);
  const auto sparse_of = [&](const at::Tensor& values) {
    const at::Tensor sparse = at::sparse_coo_tensor(indices, values, {3});
    return coalesced ? sparse.coalesce() : sparse;
  };
  const at::Tensor a = leaf(at::rand({3})), b = leaf(at::rand({3}));
  const at::Tensor s = sparse_of(a.detach()).requires_grad_();
  const auto expected =
      local_gradients((s.to_dense() * b).sum() + (sparse_of(a).to_dense() * b).sum(), {a, b, s});
  for (const int to : {0, 1}) {
    CAPTURE(coalesced, to);
    autograd::Context context(cluster[0]);
    const at::Tensor argument = cluster[0].rpc_sync<&to_dense>(to, s);
    const at::Tensor result = cluster[0].rpc_sync<&identity>(to, sparse_of(a));
    CHECK(result.is_sparse());
    autograd::backward(context, {(argument * b).sum() + (result.to_dense() * b).sum()});
    CHECK(at::equal(context.gradient(a), expected[0]));
    CHECK(at::allclose(context.gradient(b), expected[1]));
    CHECK(at::equal(context.gradient(s).to_dense(), expected[2].to_dense()));
  }
}

TEST_CASE("a call under a no-grad guard is outside of the context") {
  Cluster cluster(2, setup);
  const RRef<Scale> scale = cluster[0].remote_new<Scale>(1, at::ones({3}, at::kDouble));
  const RRef<at::Tensor> weight = scale.rpc_sync<&Scale::parameter>();
  autograd::Context context(cluster[0]);
  const at::Tensor x = leaf(at::rand({3}));
  {
    const at::NoGradGuard no_grad;
    CHECK_FALSE(scale.rpc_sync<&Scale::forward>(x).requires_grad());
    CHECK_FALSE(scale.remote<&Scale::forward>(x).to_here().requires_grad());
    CHECK_FALSE(weight.to_here().requires_grad());
    // The calls that the remote function makes in turn do not belong to the context either.
    CHECK_FALSE(cluster[0].rpc_sync<&around>(1, x, 2).requires_grad());
  }
  {
    const c10::InferenceMode inference;
    CHECK_FALSE(scale.rpc_sync<&Scale::forward>(x).requires_grad());
  }
  const at::Tensor y = scale.rpc_sync<&Scale::forward>(x);
  autograd::backward(context, {y.sum()});
  CHECK(context.gradient(x).defined());
  CHECK(scale.rpc_sync<&Scale::gradient>(context.id()).defined());
}

TEST_CASE("a hook that changes torch's thread-local state changes it for itself only") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::rand({2})), b = a * 2, c = b * 3;
  c.register_hook([](const at::Tensor&) { at::GradMode::set_enabled(true); });
  bool records = true;
  b.register_hook([&](const at::Tensor&) { records = at::GradMode::is_enabled(); });
  autograd::Context context(cluster[0]);
  autograd::backward(context, {cluster[0].rpc_sync<&mul>(1, c, c).sum()});
  CHECK_FALSE(records);
}

TEST_CASE("nested calls, shared leaves and outputs that are used twice have the right gradients") {
  Cluster cluster(3, setup);
  const at::Tensor a = leaf(at::rand({4})), b = leaf(at::rand({4}));
  const auto expected = local_gradients(
      [&] {
        const at::Tensor n = (a * (a + 1)).exp();
        const at::Tensor s = b.sin(), c = b.cos();
        return (n * s + c * s * a + n).sum();
      }(),
      {a, b});
  for (int repeat = 0; repeat < 20; ++repeat) {
    autograd::Context context(cluster[0]);
    const at::Tensor n = cluster[0].rpc_sync<&there_and_back>(1, a);
    const auto [s, c] = cluster[0].rpc_sync<&split>(2, b);
    autograd::backward(context, {(n * s + c * s * a + n).sum()});
    CHECK(at::allclose(context.gradient(a), expected[0], 1e-12, 1e-12));
    CHECK(at::allclose(context.gradient(b), expected[1], 1e-12, 1e-12));
  }
  check_no_leaks(cluster);
}

TEST_CASE("a chain of calls around the ring that is longer than the number of ranks") {
  Cluster cluster(3, setup);
  const at::Tensor a = leaf(at::rand({3}));
  at::Tensor x = a;
  std::function<at::Tensor(at::Tensor, int)> local = [&](at::Tensor t, int hops) -> at::Tensor {
    return hops == 0 ? t * 2 : local(t.sin(), hops - 1) + t;
  };
  const auto expected = local_gradients(local(a, 10).sum(), {a});
  autograd::Context context(cluster[0]);
  autograd::backward(context, {cluster[0].rpc_sync<&around>(1, a, 10).sum()});
  CHECK(at::allclose(context.gradient(a), expected[0], 1e-12, 1e-12));
}

TEST_CASE("chains through remote(), RRef arguments and to_here() have the right gradients") {
  Cluster cluster(3, setup);
  const at::Tensor a = leaf(at::rand({3})), b = leaf(at::rand({3}));
  const auto expected = local_gradients(((a * b) * (a * b) * b).sum(), {a, b});
  {
    autograd::Context context(cluster[0]);
    RRef<at::Tensor> product = cluster[0].remote<&mul>(1, a, b);
    const at::Tensor here = product.to_here();
    const at::Tensor there = cluster[0].rpc_sync<&times_ref>(2, here * b, product);
    autograd::backward(context, {there.sum()});
    CHECK(at::allclose(context.gradient(a), expected[0], 1e-12, 1e-12));
    CHECK(at::allclose(context.gradient(b), expected[1], 1e-12, 1e-12));
  }
  check_no_leaks(cluster);
}

TEST_CASE("a remote module's parameter has its gradient on its owner, one for each context") {
  Cluster cluster(2, setup);
  const at::Tensor w = at::rand({3}, at::kDouble);
  {
    RRef<Scale> module = cluster[0].remote_new<Scale>(1, w);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 10; ++i) {
          const at::Tensor x = at::full({3}, t + 1.0, at::kDouble);
          autograd::Context context(cluster[0]);
          autograd::backward(context, {module.rpc_sync<&Scale::forward>(x).sum()});
          const at::Tensor g = module.rpc_sync<&Scale::gradient>(context.id());
          if (!at::equal(g, x)) throw std::runtime_error("contexts mixed up");
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
  check_no_leaks(cluster);
}

TEST_CASE("tensor and node hooks run, and may change the gradient") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::ones({2}));
  int calls = 0;
  a.register_hook([&](const at::Tensor& g) {
    ++calls;
    return g * 10;
  });
  autograd::Context context(cluster[0]);
  const at::Tensor y = cluster[0].rpc_sync<&mul>(1, a * 1, a.detach());
  y.register_hook([&](const at::Tensor& g) {
    ++calls;
    return g + 1;
  });
  autograd::backward(context, {y.sum()});
  CHECK(calls == 2);
  CHECK(at::equal(context.gradient(a), at::full({2}, 20.0, at::kDouble)));
}

TEST_CASE("hooks behind a leaf's AccumulateGrad run when the context has the gradient") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::ones({2}));
  const auto accumulator = torch::autograd::impl::grad_accumulator(a);
  std::optional<autograd::Context> context(cluster[0]);
  struct Call {
    size_t outputs;
    at::Tensor gradient;
    at::Tensor in_context;
    uint64_t current;
  };
  std::vector<Call> calls;
  accumulator->add_post_hook(std::make_unique<
                             torch::autograd::utils::
                                 LambdaPostHook>([&](const torch::autograd::variable_list& outputs,
                                                     const torch::autograd::variable_list& grads)
                                                     -> torch::autograd::variable_list {
    calls.push_back({outputs.size(), grads.at(0), context->gradient(a), rpc::current_context()});
    return {};
  }));
  const at::Tensor y = cluster[0].rpc_sync<&mul>(1, a, a.detach() * 3).sum();
  autograd::backward(*context, {y}, {.retain_graph = true});
  autograd::backward(*context, {y});
  REQUIRE(calls.size() == 2);
  for (const Call& call : calls) {
    CHECK(call.outputs == 0);
    CHECK(at::equal(call.gradient, at::full({2}, 3.0, at::kDouble)));  // the gradient of this pass
    CHECK(call.current == context->id());
  }
  CHECK(at::equal(calls[1].in_context, at::full({2}, 6.0, at::kDouble)));
  calls[0].gradient.zero_();  // the hook owns its copy; the context's gradient does not change
  CHECK(at::equal(context->gradient(a), at::full({2}, 6.0, at::kDouble)));

  calls.clear();
  context.reset();
  context.emplace(cluster[0]);
  autograd::backward(*context, {GivesNoGradient::apply(a).sum()});
  REQUIRE(calls.size() == 1);
  CHECK_FALSE(calls[0].gradient.defined());
}

TEST_CASE("a hook behind a leaf's AccumulateGrad may fail the pass, also on another rank") {
  Cluster cluster(2, setup);
  const RRef<Scale> module = cluster[0].remote_new<Scale>(1, at::ones({2}, at::kDouble));
  module.rpc_sync<&Scale::break_hook>();
  autograd::Context context(cluster[0]);
  const at::Tensor y = module.rpc_sync<&Scale::forward>(at::ones({2}, at::kDouble)).sum();
  const base::Error e = error_of([&] { autograd::backward(context, {y}); });
  CHECK(e.kind == ErrorKind::kRemoteFailed);
  CHECK(e.rank == 1);
  CHECK(e.message.find("post hook broke") != std::string::npos);
}

TEST_CASE("gradients are announced when they are ready, and then the end of the pass") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::ones({2})), b = leaf(at::ones({2})), unused = leaf(at::ones({2}));
  autograd::Context context(cluster[0]);
  std::vector<std::string> events;
  context.on_gradient_ready(a, [&](const at::Tensor& g) {
    events.push_back("a");
    context.set_gradient(a, g * 2);
  });
  context.on_gradient_ready(b, [&](const at::Tensor&) { events.push_back("b"); });
  context.on_gradient_ready(unused, [&](const at::Tensor&) { events.push_back("unused"); });
  context.on_pass_end([&] { events.push_back("end"); });
  autograd::backward(context, {cluster[0].rpc_sync<&mul>(1, a, b).sum()});
  REQUIRE(events.size() == 3);
  CHECK(events.back() == "end");
  CHECK(at::equal(context.gradient(a), at::full({2}, 2.0, at::kDouble)));
}

TEST_CASE("each leaf has its own gradient even if one tensor was passed to several") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::ones({2})), b = leaf(at::ones({2})), c = leaf(at::ones({1}));
  autograd::Context context(cluster[0]);
  autograd::backward(context, {(cluster[0].rpc_sync<&mul>(1, a + b, a.detach()) + c).sum()});
  context.gradient(a).mul_(10);
  context.gradient(b).add_(1);
  CHECK(at::equal(context.gradient(a), at::full({2}, 10.0, at::kDouble)));
  CHECK(at::equal(context.gradient(b), at::full({2}, 2.0, at::kDouble)));
  CHECK(at::equal(context.gradient(c), at::full({1}, 2.0, at::kDouble)));
}

TEST_CASE("each leaf has its own sparse rows even if one tensor of rows was passed to several") {
  Cluster cluster(1, setup);
  const bool share_values = GENERATE(true, false);
  CAPTURE(share_values);
  const at::Tensor a = leaf(at::ones({4, 2})), b = leaf(at::ones({4, 2}));
  autograd::Context context(cluster[0]);
  autograd::backward(context, {GivesSharedRows::apply(a, b, share_values).sum()});
  const at::Tensor expected = context.gradient(b).to_dense();
  context.gradient(a)._values().mul_(10);
  context.gradient(a)._indices().fill_(3);
  CHECK(at::equal(context.gradient(b).to_dense(), expected));
}

TEST_CASE("the gradients of several passes of one context are summed") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::ones({2}));
  autograd::Context context(cluster[0]);
  const at::Tensor y = cluster[0].rpc_sync<&mul>(1, a, a.detach() * 3).sum();
  autograd::backward(context, {y}, {.retain_graph = true});
  autograd::backward(context, {y});
  CHECK(at::equal(context.gradient(a), at::full({2}, 6.0, at::kDouble)));
}

TEST_CASE("a plain backward over a remote result names autograd::backward") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::ones({2}));
  autograd::Context context(cluster[0]);
  const at::Tensor y = cluster[0].rpc_sync<&mul>(1, a, a);
  std::string text;
  try {
    y.sum().backward();
  } catch (const std::exception& e) {
    text = e.what();
  }
  CHECK(text.find("autograd::backward") != std::string::npos);
}

TEST_CASE("failures reach the initiator and end its hooks") {
  Cluster cluster(2, setup);
  const at::Tensor a = leaf(at::ones({2}));
  {
    autograd::Context context(cluster[0]);
    auto token = std::make_shared<int>(1);
    context.on_pass_end([token] {});
    const at::Tensor y = cluster[0].rpc_sync<&fail_in_backward>(1, a);
    const base::Error e = error_of([&] { autograd::backward(context, {y.sum()}); });
    CHECK(e.rank == 1);
    CHECK(e.message.find("hook broke") != std::string::npos);
    CHECK(token.use_count() == 1);
  }
  {
    // If a result is unused, the error names the loss and the function that returned the result.
    autograd::Context context(cluster[0]);
    const at::Tensor used = cluster[0].rpc_sync<&mul>(1, a, a);
    static_cast<void>(cluster[0].rpc_sync<&identity>(1, a));
    const base::Error e = error_of([&] { autograd::backward(context, {used.sum()}); });
    CHECK(e.kind == ErrorKind::kInvalid);
    CHECK(e.rank == 0);
    CHECK(e.message ==
          "no gradient for the result of identity on rank 1 (" + cluster[0].worker(1).name +
              "): the loss of rank 0 (" + cluster[0].name() +
              ") does not depend on it; use the result of each call in the loss, or make the call "
              "under an at::NoGradGuard");
  }
  {
    // A call under a NoGradGuard needs no gradient, as the error message of the case above says.
    autograd::Context context(cluster[0]);
    const at::Tensor used = cluster[0].rpc_sync<&mul>(1, a, a);
    {
      const at::NoGradGuard no_grad;
      static_cast<void>(cluster[0].rpc_sync<&identity>(1, a));
    }
    autograd::backward(context, {used.sum()});
  }
  {
    // Rank 1 does not use the result of a call to itself. Rank 0 knows only that rank 1 sent
    // messages, so the error names no function.
    autograd::Context context(cluster[0]);
    const at::Tensor used = cluster[0].rpc_sync<&wasteful>(1, a);
    const base::Error e = error_of([&] { autograd::backward(context, {used.sum()}); });
    CHECK(e.message.find("of the messages that rank 1 sent: the loss of rank 0 (") !=
          std::string::npos);
  }
  {
    autograd::Context context(cluster[0]);
    CHECK(error_of([&] { autograd::backward(context, {at::ones({1})}); }).kind ==
          ErrorKind::kInvalid);
  }
  check_no_leaks(cluster);
}

TEST_CASE("a rank that dies during the pass fails the pass") {
  Cluster cluster(3, setup);
  const at::Tensor a = leaf(at::ones({2}));
  autograd::Context context(cluster[0]);
  const at::Tensor y = cluster[0].rpc_sync<&mul>(2, a, a);
  cluster.kill(2);
  CHECK(error_of([&] { autograd::backward(context, {y.sum()}); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("contexts that a lost rank began end, contexts that it only joined do not") {
  Cluster cluster(4, setup);
  g_told = 0;
  std::optional<autograd::Context> kept(cluster[0]);
  cluster[0].rpc_sync<&around>(1, leaf(at::ones({2})), 1);  // which calls rank 2
  std::thread loser([&] {  // a new thread, whose current context is the lost rank's own
    autograd::Context context(cluster[1]);
    cluster[1].rpc_sync<&around>(2, leaf(at::ones({2})), 2);  // → rank 2 → rank 3 → rank 0
    cluster[1].rpc_sync<&mul_guarded>(3, leaf(at::ones({2})));
    CHECK(cluster[2].live_contexts() == 2);
    CHECK(cluster[3].live_contexts() == 1);
    cluster[1].abort({ErrorKind::kBadData, "no more", -1, {}});
  });
  loser.join();
  const auto deadline = std::chrono::steady_clock::now() + 30s;
  const auto over = [&] {
    return cluster[2].live_contexts() == 1 && cluster[3].live_contexts() == 0 &&
           cluster[0].live_contexts() == 1 && g_told == 1;
  };
  while (!over() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(1ms);
  CHECK(over());
  // Fails when rank 0 knows that rank 1, through which rank 2 joined the context, is lost.
  CHECK_THROWS_AS(cluster[0].rpc_sync<&around>(1, leaf(at::ones({2})), 1), base::Exception);
  kept.reset();
  const auto gone = [&] { return cluster[2].live_contexts() == 0; };
  while (!gone() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(1ms);
  CHECK(gone());
}
