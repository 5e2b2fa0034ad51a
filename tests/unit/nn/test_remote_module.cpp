#include <atomic>
#include <chrono>
#include <thread>

#include <torch/nn/module.h>

#include "distrain/autograd/context.h"
#include "distrain/nn/remote_module.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using base::ErrorKind;
using nn::RemoteModule;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::error_of;

namespace {

// y = x · w + b, on any rank.
struct Affine {
  using Constructor = Affine(int64_t in, int64_t out, double value);
  Affine(int64_t in, int64_t out, double value) {
    if (in <= 0) throw base::Exception(ErrorKind::kInvalid, "in must be positive");
    w = at::full({in, out}, value, at::kDouble).requires_grad_();
    b = at::ones({out}, at::kDouble).requires_grad_();
    ++alive;
  }
  Affine(const Affine&) = delete;
  ~Affine() {
    if (w.defined()) --alive;
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(w) + b; }
  std::vector<at::Tensor> parameters() const { return {w, b}; }
  at::Tensor w, b;
  static inline std::atomic<int> alive{0};
};
using Module = RemoteModule<Affine>;

// A module whose forward() takes and returns values of several types.
struct Words {
  using Constructor = Words(int64_t first, int64_t second);
  Words(int64_t, int64_t) : parameter(at::ones({1}).requires_grad_()) {}
  std::tuple<std::string, int64_t, at::Tensor> forward(const at::Tensor& tensor, int64_t number,
                                                       const std::string& word) {
    return {word, number, tensor};
  }
  std::vector<at::Tensor> parameters() const { return {parameter}; }
  void train(bool on) { training = on; }
  at::Tensor parameter;
  bool training = true;
};
using WordsModule = RemoteModule<Words>;
using WordsResult = std::tuple<std::string, int64_t, at::Tensor>;

bool trains(const RRef<Words>& module) { return module.local_value().training; }
std::tuple<int, WordsResult, WordsResult> use(const WordsModule& module, const at::Tensor& tensor) {
  return {module.owner(), module.forward(tensor, 2, "3"),
          module.forward_async(tensor, 2, "3").wait()};
}
WordsModule from_rref(const RRef<Words>& module) { return WordsModule(module); }

at::Tensor apply(const Module& module, at::Tensor x) { return module.forward(x); }
Module give_back(const Module& module) { return module; }
Module make_elsewhere(rpc::CallContext& context, int owner, double value) {
  return Module(context.agent, owner, 3, 2, value);
}
at::Tensor gradient_of(rpc::CallContext& context, const RRef<at::Tensor>& parameter, uint64_t id) {
  return autograd::gradient(context.agent, id, parameter.local_value());
}

void setup(Agent& agent) {
  autograd::install(agent);
  nn::expose_module<Affine>(agent, "Affine");
  agent.expose<&apply>("apply");
  agent.expose<&give_back>("give_back");
  agent.expose<&make_elsewhere>("make_elsewhere");
  agent.expose<&gradient_of>("gradient_of");
  nn::expose_module<Words>(agent, "Words");
  agent.expose<&trains>("trains");
  agent.expose<&use>("use");
  agent.expose<&from_rref>("from_rref");
}

void check_words(const WordsResult& result) {
  CHECK(std::get<0>(result) == "3");
  CHECK(std::get<1>(result) == 2);
  CHECK(at::equal(std::get<2>(result), at::ones({1})));
}

// What a handle of a remote module cannot do does not compile.
template <class M>
concept HasUnsupported = requires(M m) {
  m.register_buffer("b", at::Tensor());
}
|| requires(M m) { m.register_parameter("p", at::Tensor()); }
|| requires(M m) { m.cuda(); }
|| requires(M m) { m.cpu(); }
|| requires(M m) { m.to(at::kCPU); }
|| requires(M m) { m.to(at::kDouble); }
|| requires(M m) { m.parameters(); }
|| requires(M m) { m.buffers(); }
|| requires(M m) { m.named_buffers(); }
|| requires(M m) { m.children(); }
|| requires(M m) { m.named_children(); }
|| requires(M m) { m.modules(); }
|| requires(M m) { m.named_modules(); }
|| requires(M m) { m.zero_grad(); }
|| requires(M m) {
  m.apply([](torch::nn::Module&) {});
};
static_assert(HasUnsupported<torch::nn::Module>);

void check_all_gone(Cluster& cluster) {
  cluster.shutdown();
  for (int rank = 0; rank < cluster.size(); ++rank) {
    CHECK(cluster[rank].live_rrefs() == 0);
    CHECK(cluster[rank].live_contexts() == 0);
  }
  CHECK(Affine::alive == 0);
}

}  // namespace

TEST_CASE("a remote module is used like a local one") {
  Cluster cluster(3, setup);
  for (int owner = 0; owner < 3; ++owner) {
    CAPTURE(owner);
    const Module module(cluster[0], owner, 3, 2, 0.5);
    CHECK(module.owner() == owner);
    const at::Tensor x = at::ones({4, 3}, at::kDouble);
    const at::Tensor expected = at::full({4, 2}, 2.5, at::kDouble);
    CHECK(at::equal(module.forward(x).detach(), expected));
    std::vector<base::Future<at::Tensor>> futures;
    for (int i = 0; i < 8; ++i) futures.push_back(module.forward_async(x * i));
    for (int i = 0; i < 8; ++i) {
      CHECK(at::equal(futures[static_cast<size_t>(i)].wait().detach(),
                      at::full({4, 2}, 1.5 * i + 1, at::kDouble)));
    }
  }
  check_all_gone(cluster);
}

TEST_CASE("remote_parameters are those of the module, in order, on its rank") {
  Cluster cluster(3, setup);
  {
    const Module module(cluster[0], 2, 3, 2, 0.5);
    const std::vector<RRef<at::Tensor>> parameters = module.remote_parameters();
    REQUIRE(parameters.size() == 2);
    CHECK(parameters[0].owner() == 2);
    CHECK(parameters[0].to_here().sizes() == at::IntArrayRef({3, 2}));
    CHECK(parameters[1].to_here().sizes() == at::IntArrayRef({2}));

    // The RRefs share the module's tensors, so a pass through the module gives them gradients.
    const at::Tensor x = at::rand({4, 3}, at::kDouble).requires_grad_();
    autograd::Context context(cluster[0]);
    autograd::backward(context, {module.forward(x).sum()});
    CHECK(at::allclose(context.gradient(x), at::ones({4, 3}, at::kDouble)));
    const rpc::ContextScope outside(0);
    const at::Tensor w = cluster[0].rpc_sync<&gradient_of>(2, parameters[0], context.id());
    const at::Tensor b = cluster[0].rpc_sync<&gradient_of>(2, parameters[1], context.id());
    CHECK(at::allclose(w, x.detach().sum(0).unsqueeze(1).expand({3, 2})));
    CHECK(at::equal(b, at::full({2}, 4.0, at::kDouble)));
  }
  check_all_gone(cluster);
}

TEST_CASE("a module may be an argument and a result, and lives as long as it is referenced") {
  Cluster cluster(3, setup);
  const at::Tensor x = at::ones({1, 3}, at::kDouble);
  for (int owner = 0; owner < 3; ++owner) {
    for (int user = 0; user < 3; ++user) {
      CAPTURE(owner, user);
      Module module(cluster[0], owner, 3, 2, 1);
      CHECK(at::equal(cluster[0].rpc_sync<&apply>(user, module, x).detach(),
                      at::full({1, 2}, 4.0, at::kDouble)));
      const Module back = cluster[0].rpc_sync<&give_back>(user, module);
      module = Module();
      CHECK(at::equal(back.forward(x).detach(), at::full({1, 2}, 4.0, at::kDouble)));
      const Module made = cluster[0].rpc_sync<&make_elsewhere>(user, owner, 2.0);
      CHECK(made.owner() == owner);
      CHECK(at::equal(made.forward(x).detach(), at::full({1, 2}, 7.0, at::kDouble)));
    }
  }
  {
    // Gradients pass through a call that itself calls the module.
    const Module module(cluster[0], 2, 3, 2, 1);
    const at::Tensor leaf = at::rand({2, 3}, at::kDouble).requires_grad_();
    autograd::Context context(cluster[0]);
    autograd::backward(context, {cluster[0].rpc_sync<&apply>(1, module, leaf).sum()});
    CHECK(at::equal(context.gradient(leaf), at::full({2, 3}, 2.0, at::kDouble)));
  }
  check_all_gone(cluster);
}

TEST_CASE("an error of the constructor is thrown by the first use") {
  Cluster cluster(2, setup);
  for (int owner = 0; owner < 2; ++owner) {
    const Module module(cluster[0], owner, -1, 2, 0.5);
    for (const auto& use : std::vector<std::function<void()>>{
             [&] {
               module.forward(at::ones({1, 3}));
             },
             [&] {
               module.forward_async(at::ones({1, 3})).wait();
             },
             [&] { module.remote_parameters(); },
         }) {
      const base::Error e = error_of(use);
      CHECK(e.kind == ErrorKind::kInvalid);
      CHECK(e.message == "in must be positive");
      CHECK(e.rank == owner);
    }
  }
  check_all_gone(cluster);
}

TEST_CASE("forward() of a remote module may take and return values of several types") {
  Cluster cluster(2, setup);
  {
    const WordsModule module(cluster[0], 1, 1, 2);
    check_words(module.forward(at::ones({1}), 2, "3"));
    check_words(module.forward_async(at::ones({1}), 2, "3").wait());
  }
  check_all_gone(cluster);
}

TEST_CASE("rref() refers to the module on its owner, whose parameters can be fetched") {
  Cluster cluster(2, setup);
  {
    const WordsModule module(cluster[0], 1, 1, 2);
    CHECK(module.rref().owner() == 1);
    CHECK(cluster[0].rpc_sync<&trains>(1, module.rref()));
    const auto parameters = module.remote_parameters();
    REQUIRE(parameters.size() == 1);
    CHECK(at::equal(parameters[0].to_here(), at::ones({1})));
  }
  check_all_gone(cluster);
}

TEST_CASE("train() and eval() of a handle set the mode of the module on its owner") {
  Cluster cluster(3, setup);
  {
    const WordsModule module(cluster[0], 1, 1, 2);
    const WordsModule other = cluster[0].rpc_sync<&from_rref>(2, module.rref());
    for (const bool on : {false, true}) {
      on ? module.train() : module.eval();
      CHECK(cluster[0].rpc_sync<&trains>(1, module.rref()) == on);
      CHECK(cluster[0].rpc_sync<&trains>(1, other.rref()) == on);
    }
    module.train(false);
    CHECK_FALSE(cluster[0].rpc_sync<&trains>(1, module.rref()));
  }
  check_all_gone(cluster);
}

TEST_CASE("a handle that was sent to a third rank names its owner and calls the module") {
  Cluster cluster(3, setup);
  {
    const WordsModule module(cluster[0], 1, 1, 2);
    const auto [owner, now, later] = cluster[0].rpc_sync<&use>(2, module, at::ones({1}));
    CHECK(owner == 1);
    check_words(now);
    check_words(later);
  }
  check_all_gone(cluster);
}

TEST_CASE("a handle may be made from the RRef of a module, on any rank") {
  Cluster cluster(3, setup);
  {
    const WordsModule module(cluster[0], 1, 1, 2);
    const WordsModule other = cluster[0].rpc_sync<&from_rref>(2, module.rref());
    CHECK(other.owner() == 1);
    for (const auto& [rank, handle] : {std::pair(1, module), std::pair(2, other)}) {
      const auto [owner, now, later] = cluster[0].rpc_sync<&use>(rank, handle, at::ones({1}));
      CHECK(owner == 1);
      check_words(now);
      check_words(later);
    }
  }
  check_all_gone(cluster);
}

TEST_CASE("what torch's RemoteModule refuses when called, ours does not have") {
  STATIC_REQUIRE_FALSE(HasUnsupported<WordsModule>);
  STATIC_REQUIRE_FALSE(HasUnsupported<RemoteModule<>>);
}
