#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include "module_support.h"
#include "support/plain_net.h"

using namespace distrain;
using base::ErrorKind;
using nn::RemoteModule;
using testing::Cluster;
using testing::cluster_with;
using testing::error_of;
using testing::PlainNet;

namespace {

// A class that is not a torch::nn module cannot be exposed by name, and forward() of a class
// without forward() cannot be called.
struct NoModule {
  using Constructor = NoModule(int first, int second);
  NoModule(int, int) {}
};
struct NoTorchModule : NoModule {
  using NoModule::NoModule;
  at::Tensor forward(const at::Tensor& x) { return x; }
};
template <class Module>
concept can_be_exposed = requires(rpc::Agent& agent, Module (*make)(int, int)) {
  nn::expose_module(agent, "module", make);
};
template <class Module>
concept can_forward = requires(const RemoteModule<Module>& module, const at::Tensor& x) {
  module.forward(x);
};
template <class Module>
concept can_forward_async = requires(const RemoteModule<Module>& module, const at::Tensor& x) {
  module.forward_async(x);
};

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    linear = register_module("linear", torch::nn::Linear(8, 4));
    bn = register_module("bn", torch::nn::BatchNorm1d(4));
  }
  at::Tensor forward(const at::Tensor& x) { return bn->forward(linear->forward(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
};
TORCH_MODULE(Block);

// Writes a buffer in training mode: in the batch_norm kernel if `by_kernel`, otherwise in place.
struct CounterImpl : torch::nn::Module {
  explicit CounterImpl(bool by_kernel) : by_kernel_(by_kernel) {
    linear = register_module("linear", torch::nn::Linear(8, 4));
    mean = register_buffer("mean", at::zeros({4}));
    var = register_buffer("var", at::ones({4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = linear->forward(x);
    if (by_kernel_) return at::batch_norm(y, {}, {}, mean, var, is_training(), 0.1, 1e-5, false);
    if (is_training()) mean.add_(y.detach().mean(0));
    return y - mean;
  }
  torch::nn::Linear linear{nullptr};
  at::Tensor mean, var;
  const bool by_kernel_;
};
TORCH_MODULE(Counter);

struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(bool by_kernel) { inner = register_module("inner", Counter(by_kernel)); }
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x); }
  Counter inner{nullptr};
};
TORCH_MODULE(Outer);

// A module with parameters that cannot be versioned, for example because they overlap in memory.
struct OddImpl : torch::nn::Module {
  explicit OddImpl(const std::string& how) {
    const at::Tensor whole = at::rand({4, 4});
    if (how == "overlap") {
      register_parameter("first", whole[0]);
      register_parameter("second", whole[1]);
    } else if (how == "expanded") {
      register_parameter("first", at::rand({1}).expand({4}));
    } else if (how == "meta") {
      register_parameter("first", at::empty({4}, at::kMeta));
    } else if (how == "other") {
      static std::atomic<int64_t> size{1};
      register_parameter("first", at::rand({size++}));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Odd);

struct GrowingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    return x * weight.add_(1);
  }
  at::Tensor weight = register_parameter("weight", at::ones({1}));
};
TORCH_MODULE(Growing);

struct TwoImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return x + y; }
};
TORCH_MODULE(Two);

base::Error refusal_of(const auto& make) {
  Cluster cluster = cluster_with(make);
  return error_of([&] { RemoteModule(cluster[0], 1, "net"); });
}

}  // namespace

TEST_CASE("a module that keeps running statistics is refused by name and type") {
  const base::Error plain = refusal_of([] { return Block(); });
  CHECK(plain.kind == ErrorKind::kInvalid);
  CHECK(plain.message.starts_with(
      "module net.bn (torch::nn::BatchNorm1dImpl) writes its running statistics in training"));
  CHECK(refusal_of([] {
          return torch::nn::Sequential(
              torch::nn::Conv1d(1, 2, 3),
              torch::nn::InstanceNorm1d(
                  torch::nn::InstanceNorm1dOptions(2).track_running_stats(true)));
        }).message.starts_with("module net.1 (torch::nn::InstanceNorm1dImpl) writes its running"));
  // Without running statistics the module is accepted.
  Cluster cluster = cluster_with([] {
    return torch::nn::Sequential(
        torch::nn::Linear(8, 4),
        torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(4).track_running_stats(false)),
        torch::nn::Linear(4, 2));
  });
  CHECK(RemoteModule(cluster[0], 1, "net").forward(at::rand({3, 8})).sizes() ==
        at::IntArrayRef({3, 2}));
}

TEST_CASE("a forward pass that writes a buffer is refused, and its write is not visible") {
  const bool by_kernel = GENERATE(false, true);
  CAPTURE(by_kernel);
  Cluster cluster = cluster_with([=] { return Outer(by_kernel); });
  RemoteModule net(cluster[0], 1, "net");
  const at::Tensor x = at::rand({3, 8});
  const rpc::NamedTensors before = net.state();
  for (int i = 0; i < 3; ++i) {
    const base::Error error = error_of([&] { net.forward(x); });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.message.starts_with("module net.inner ("));
    CHECK(error.message.find("CounterImpl) writes its buffer mean in forward()") !=
          std::string::npos);
  }
  const rpc::NamedTensors after = net.state();
  for (const auto& [name, tensor] : before) CHECK(at::equal(after.at(name), tensor));
  net.eval();
  CHECK(net.forward(x).sizes() == at::IntArrayRef({3, 4}));
}

TEST_CASE("a module whose forward pass writes its parameters is refused") {
  const auto options = torch::nn::EmbeddingOptions(4, 2).max_norm(1);
  const base::Error table = refusal_of([&] { return torch::nn::Embedding(options); });
  CHECK(table.kind == ErrorKind::kInvalid);
  CHECK(table.message.starts_with(
      "module net (torch::nn::EmbeddingImpl) rescales its rows in forward()"));
  Cluster cluster = cluster_with([] { return Growing(); });
  const RemoteModule net(cluster[0], 1, "net");
  const base::Error error = error_of([&] { net.forward(at::ones({1})); });
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.message.starts_with("module net writes its parameter weight in forward()"));
}

TEST_CASE("parameters that cannot be copied to a version are refused by name") {
  const auto refusal = [](const std::string& how) {
    const base::Error error = refusal_of([how] { return Odd(how); });
    CHECK(error.kind == ErrorKind::kInvalid);
    return error.message;
  };
  CHECK(refusal("overlap") ==
        "module net: first and second share their memory: register the same tensor twice, or two "
        "tensors");
  CHECK(refusal("expanded") ==
        "parameter net.first (Float [4]) has elements that share their memory");
  CHECK(refusal("meta") == "parameter net.first has no memory: it is on the meta device");

  Cluster cluster = cluster_with([] { return Odd("other"); });
  const RemoteModule net(cluster[0], 1, "net");
  error_of([&] { net.forward(); });  // fails, so the next pass needs a second module
  const base::Error error = error_of([&] { net.forward(at::ones({1})); });
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.message.starts_with("module net: make() gave another one than at first: first is"));
}

TEST_CASE("a class that is not a module can neither be exposed nor called as a remote module") {
  STATIC_REQUIRE(can_be_exposed<PlainNet>);
  STATIC_REQUIRE(can_be_exposed<torch::nn::Sequential>);
  STATIC_REQUIRE(can_be_exposed<std::shared_ptr<torch::nn::LinearImpl>>);
  STATIC_REQUIRE_FALSE(can_be_exposed<NoModule>);
  STATIC_REQUIRE_FALSE(can_be_exposed<NoTorchModule>);
  STATIC_REQUIRE_FALSE(can_be_exposed<std::shared_ptr<NoModule>>);
  STATIC_REQUIRE_FALSE(can_be_exposed<int>);
  STATIC_REQUIRE(can_forward<NoTorchModule> && can_forward_async<NoTorchModule>);
  STATIC_REQUIRE_FALSE(can_forward<NoModule>);
  STATIC_REQUIRE_FALSE(can_forward_async<NoModule>);
}

TEST_CASE("an unknown name is refused with the list of exposed names") {
  Cluster cluster(3, [](rpc::Agent& agent) {
    if (agent.rank() == 2) return autograd::install(agent);  // rank 2 does not install modules
    testing::setup_modules(agent);
    if (agent.rank() == 0) return;
    nn::expose_module(agent, "net", [] { return PlainNet(); });
    nn::expose_module(agent, "two", [] { return Two(); });
    CHECK(error_of([&] { nn::expose_module(agent, "net", [] { return Two(); }); }).message ==
          "a module 'net' is exposed already");
  });
  const base::Error unknown = error_of([&] { RemoteModule(cluster[0], 1, "nte"); });
  CHECK(unknown.kind == ErrorKind::kNotFound);
  CHECK(unknown.message == "w1 exposes no module 'nte', but net, two");
  CHECK(error_of([&] { RemoteModule(cluster[1], 0, "net"); }).message ==
        "w0 exposes no module 'net', but none at all");
  CHECK(error_of([&] { RemoteModule(cluster[0], 2, "net"); }).kind == ErrorKind::kNotFound);
  CHECK(error_of([&] { RemoteModule(cluster[2], 1, "net"); }).message ==
        "this agent has no modules: call nn::install(agent) before join()");
}

TEST_CASE("an error of a module's forward has its name, and the module stays usable") {
  Cluster cluster(2, [](rpc::Agent& agent) {
    testing::setup_modules(agent);
    nn::expose_module(agent, "two", [] { return Two(); });
    nn::expose_module(agent, "net", [] { return PlainNet(); });
    nn::expose_module(agent, "lstm", [] { return torch::nn::AnyModule(torch::nn::LSTM(2, 2)); });
    nn::expose_module(agent, "table", [] { return torch::nn::Embedding(400, 2); });
  });
  const std::string there = "' on " + cluster[1].name() + " (rank 1): ";
  const RemoteModule two(cluster[0], 1, "two"), net(cluster[0], 1, "net"),
      lstm(cluster[0], 1, "lstm");
  const at::Tensor x = at::ones({2, 2});
  const base::Error count = error_of([&] { two.forward(x); });
  CHECK(count.kind == ErrorKind::kRemoteFailed);
  CHECK(count.rank == 1);
  CHECK(count.message.starts_with("module 'two" + there));
  CHECK(count.message.find("forward() method expects 2 argument(s), but received 1.") !=
        std::string::npos);
  CHECK(count.message.find('\n') == std::string::npos);
  CHECK(at::equal(two.forward(x, x), x + x));

  const base::Error shape = error_of([&] { net.forward(x); });
  CHECK(shape.kind == ErrorKind::kRemoteFailed);
  CHECK(shape.message.starts_with("module 'net" + there));
  CHECK(shape.message.ends_with("; its inputs: Float [2, 2]"));
  CHECK(net.forward(at::rand({5, 8})).sizes() == at::IntArrayRef({5, 3}));

  const base::Error result = error_of([&] { lstm.forward(at::rand({1, 1, 2})); });
  CHECK(result.kind == ErrorKind::kInvalid);
  CHECK(result.message.starts_with("module 'lstm" + there + "its forward() gives "));

  const RemoteModule table(cluster[0], 1, "table");
  const base::Error row = error_of([&] { table.forward(at::tensor({int64_t{1}, int64_t{400}})); });
  CHECK(row.message ==
        "module 'table" + there + "index 400 is out of range, the table has 400 rows");
  CHECK(error_of([&] { table.forward(x); }).message.ends_with("; its inputs: Float [2, 2]"));
}
