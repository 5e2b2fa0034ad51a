#include <latch>

#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adam.h>

#include "module_support.h"
#include "support/plain_net.h"

using namespace distrain;
using base::ErrorKind;
using nn::RemoteModule;
using optim::DistributedOptimizer;
using optim::Sharing;
using rpc::Agent;
using testing::check_equal;
using testing::Cluster;
using testing::cluster_with;
using testing::error_of;
using testing::gradients_in;
using testing::oracle_gradients;
using testing::PlainNet;
using testing::PlainNetImpl;

namespace {

torch::nn::Sequential make_sequential() {
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Linear(16, 3));
}

at::Tensor loss_of(const at::Tensor& scores) { return scores.pow(2).sum(); }

// One factory for each type that a factory may return.
torch::nn::AnyModule make_any() { return torch::nn::AnyModule(PlainNet()); }
std::shared_ptr<PlainNetImpl> make_pointer() { return std::make_shared<PlainNetImpl>(); }
std::shared_ptr<torch::nn::SequentialImpl> make_sequential_pointer() {
  return make_sequential().ptr();
}

template <class Make, class Oracle>
void check_against_torch(Make make, Oracle oracle) {
  Cluster cluster = cluster_with(make);
  const RemoteModule net(cluster[0], 1, "net");
  const rpc::NamedTensors values = net.state();
  const at::Tensor x = at::rand({5, 8}).requires_grad_();
  testing::give_values(oracle, values);
  const at::Tensor expected = oracle->forward(x);
  CHECK(at::equal(net.forward(x), expected));

  autograd::Context context(cluster[0]);
  autograd::backward(context, {loss_of(net.forward(x))});
  auto wanted = oracle->parameters();
  wanted.push_back(x);
  auto gradients = torch::autograd::grad({loss_of(expected)}, wanted);
  CHECK(at::equal(context.gradient(x), gradients.back()));
  gradients.pop_back();
  check_equal(gradients_in(context, net.remote_parameters()), gradients);

  const auto named = net.named_parameters();
  REQUIRE(named.size() == oracle->parameters().size());
  for (size_t i = 0; i < named.size(); ++i) {
    CHECK(named[i].first == oracle->named_parameters()[i].key());
    CHECK(at::equal(named[i].second.to_here(), values.at(named[i].first)));
  }
}

}  // namespace

TEST_CASE("a plain module on another rank computes what torch does, bit for bit") {
  torch::manual_seed(1);
  SECTION("a holder") {
    check_against_torch([] { return PlainNet(); }, PlainNet());
  }
  SECTION("a shared_ptr") { check_against_torch(&make_pointer, PlainNet()); }
  SECTION("an AnyModule") { check_against_torch(&make_any, PlainNet()); }
  SECTION("a Sequential") { check_against_torch(&make_sequential, make_sequential()); }
  SECTION("a pointer to a Sequential") {
    check_against_torch(&make_sequential_pointer, make_sequential());
  }
}

TEST_CASE("two forwards and an update before the first backward give torch's gradients") {
  torch::manual_seed(2);
  Cluster cluster = cluster_with([] { return PlainNet(); });
  Agent& agent = cluster[0];
  const RemoteModule net(agent, "w1", "net");
  const auto parameters = net.remote_parameters();
  DistributedOptimizer optimizer(agent, parameters, optim::Adam{.lr = 0.1});
  const at::Tensor x = at::rand({5, 8}), y = at::rand({4, 8});

  using Scope = autograd::Context::Scope;
  autograd::Context first(agent, Scope::kExplicit), second(agent, Scope::kExplicit);
  const auto forward = [&](const autograd::Context& context, const at::Tensor& input) {
    const rpc::ContextScope inside(context.id());
    return net.forward(input);
  };
  const auto update = [&] {
    autograd::Context context(agent);
    autograd::backward(context, {loss_of(net.forward(x))});
    optimizer.step(context);
  };
  const rpc::NamedTensors before = net.state();
  const at::Tensor one = forward(first, x);
  update();
  const rpc::NamedTensors between = net.state();
  CHECK_FALSE(at::equal(before.at("in.weight"), between.at("in.weight")));
  const at::Tensor two = forward(second, y);
  update();
  autograd::backward(first, {loss_of(one)});
  autograd::backward(second, {loss_of(two)});
  check_equal(gradients_in(first, parameters), oracle_gradients(PlainNet(), before, [&](auto& net) {
                return loss_of(net->forward(x));
              }));
  check_equal(
      gradients_in(second, parameters),
      oracle_gradients(PlainNet(), between, [&](auto& net) { return loss_of(net->forward(y)); }));
}

TEST_CASE("replicas are reused, and an update copies only parameters that a pass needs") {
  std::atomic<int> made{0};
  Cluster cluster = cluster_with([&made] {
    ++made;
    return PlainNet();
  });
  Agent& agent = cluster[0];
  const RemoteModule net(agent, 1, "net");
  const auto parameters = net.remote_parameters();
  DistributedOptimizer optimizer(agent, parameters, optim::Sgd{.lr = 0.01});
  const at::Tensor x = at::rand({5, 8});
  const auto addresses = [&] {
    std::vector<int64_t> all;
    for (const auto& parameter : parameters) {
      all.push_back(agent.rpc_sync<&testing::address_of>(1, parameter));
    }
    return all;
  };
  const auto step = [&] {
    autograd::Context context(agent);
    autograd::backward(context, {loss_of(net.forward(x))});
    optimizer.step(context);
  };
  step();
  const auto start = addresses();
  for (int i = 0; i < 5; ++i) step();
  CHECK(addresses() == start);
  CHECK(made == 1);  // the module itself is the first replica
  {
    autograd::Context slow(agent, autograd::Context::Scope::kExplicit);
    at::Tensor result;
    {
      const rpc::ContextScope inside(slow.id());
      result = net.forward(x);
    }
    step();
    CHECK(addresses() != start);
    CHECK(made == 2);
    autograd::backward(slow, {loss_of(result)});
  }
  const auto moved = addresses();
  for (int i = 0; i < 5; ++i) step();
  CHECK(addresses() == moved);
  // A pass outside of a context keeps no replica.
  for (int i = 0; i < 5; ++i) net.forward(x);
  CHECK(made == 2);
}

namespace {

// Returns weighted sums of the table's rows `ids`, in bags of two rows. If `ids` is empty, returns
// the product of `weights` and the transposed table.
struct WeightedBagImpl : torch::nn::Module {
  WeightedBagImpl() {
    const at::NoGradGuard no_grad;
    bag->weight.copy_(at::arange(12, at::kFloat).view({4, 3}));
    register_module("bag", bag);
  }
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& weights) {
    if (ids.numel() == 0) return weights.matmul(bag->weight.t());
    return bag->forward(ids, at::arange(0, ids.numel(), 2, at::kLong), weights);
  }
  torch::nn::EmbeddingBag bag{torch::nn::EmbeddingBagOptions(4, 3).sparse(true).mode(torch::kSum)};
};
TORCH_MODULE(WeightedBag);

}  // namespace

TEST_CASE("a pass that has saved a sparse table keeps its version; a lookup copies nothing") {
  Cluster cluster = cluster_with([] { return WeightedBag(); });
  Agent& agent = cluster[0];
  const RemoteModule net(agent, 1, "net");
  const auto parameters = net.remote_parameters();
  DistributedOptimizer optimizer(agent, parameters, optim::Sgd{.lr = 1});
  const at::Tensor ids = at::arange(4, at::kLong), none = at::empty({0}, at::kLong);
  using Scope = autograd::Context::Scope;
  const auto forward = [&](const autograd::Context& context, const at::Tensor& words,
                           const at::Tensor& weights) {
    const rpc::ContextScope inside(context.id());
    return net.forward(words, weights).sum();
  };
  // Updates the table as another trainer would: subtracts 100 from every element.
  const auto update = [&] {
    autograd::Context other(agent, Scope::kExplicit);
    autograd::backward(other, {forward(other, ids, at::ones({4})) * 100});
    optimizer.step(other);
  };
  const auto address = [&] { return agent.rpc_sync<&testing::address_of>(1, parameters[0]); };
  const auto start = address();
  {
    autograd::Context looking_up(agent, Scope::kExplicit);
    const at::Tensor loss = forward(looking_up, ids, at::ones({4}));
    update();
    CHECK(address() == start);
    autograd::backward(looking_up, {loss});
  }
  net.load_state({{"bag.weight", at::arange(12, at::kFloat).view({4, 3})}});
  CHECK(address() == start);
  const at::Tensor weights = at::ones({4}).requires_grad_();
  const at::Tensor hidden = at::ones({2, 3}).requires_grad_();
  autograd::Context weighing(agent, Scope::kExplicit);
  const at::Tensor weighed = forward(weighing, ids, weights);
  update();
  CHECK(address() != start);
  autograd::Context decoding(agent, Scope::kExplicit);
  const at::Tensor decoded = forward(decoding, none, hidden);
  update();
  autograd::backward(weighing, {weighed});
  autograd::backward(decoding, {decoded});
  CHECK(at::equal(weighing.gradient(weights), at::tensor({3.F, 12.F, 21.F, 30.F})));
  CHECK(at::equal(decoding.gradient(hidden)[0], at::tensor({-382.F, -378.F, -374.F})));
}

namespace {

constexpr int kAtOnce = 4;

// Measures the peak memory of the CPU tensors that are allocated during its lifetime. A thread that
// allocates a tensor of `meeting` bytes waits until kAtOnce threads have done so.
class CountedMemory final : public c10::Allocator {
 public:
  explicit CountedMemory(size_t meeting) : meeting_(meeting) { c10::SetCPUAllocator(this); }
  ~CountedMemory() override { c10::SetCPUAllocator(malloc_); }
  c10::DataPtr allocate(size_t bytes) override {
    void* const block = malloc_->raw_allocate(bytes);
    const size_t now = s_bytes += malloc_usable_size(block);
    for (size_t most = peak_; most < now && !peak_.compare_exchange_weak(most, now);) {
    }
    if (bytes > 0 && bytes == meeting_) {
      for (++met_; met_ < kAtOnce;) std::this_thread::yield();
    }
    return {block, block, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  double peak_mib() const { return static_cast<double>(peak_) / (1 << 20); }

 private:
  static void release(void* block) {
    s_bytes -= malloc_usable_size(block);
    c10::GetDefaultCPUAllocator()->raw_deleter()(block);
  }
  static inline std::atomic<size_t> s_bytes{0};
  c10::Allocator* const malloc_ = c10::GetCPUAllocator();
  const size_t meeting_;
  std::atomic<int> met_{0};
  std::atomic<size_t> peak_{0};
};

// A module with 4 MiB of parameters. Each pass waits until all passes have begun.
struct BigImpl : torch::nn::Module {
  explicit BigImpl(std::latch& all) : all(all) {}
  at::Tensor forward(const at::Tensor& x) {
    all.arrive_and_wait();
    return x * weight.sum();
  }
  std::latch& all;
  at::Tensor weight = register_parameter("weight", at::empty({1 << 20}).normal_());
};
TORCH_MODULE(Big);

template <class Make>
double peak_of_first_forwards(Make make, const at::Tensor& x, size_t meeting = 0) {
  Cluster cluster = cluster_with(make);
  const CountedMemory memory(meeting);
  const RemoteModule net(cluster[0], 1, "net");
  std::vector<base::Future<at::Tensor>> passes;
  for (int i = 0; i < kAtOnce; ++i) passes.push_back(net.forward_async(x));
  base::wait_all(passes);
  return memory.peak_mib();
}

}  // namespace

TEST_CASE("concurrent first passes share the module's memory") {
  std::latch all(kAtOnce);
  CHECK(peak_of_first_forwards([&] { return Big(all); }, at::ones({1})) <= 4 * 2.2);
  // Each pass waits when it allocates its result of kResult bytes, until all passes do so.
  constexpr size_t kResult = 3 * 64 * sizeof(float);
  const at::Tensor rows = at::zeros({3}, at::kLong);
  CHECK(peak_of_first_forwards([] { return torch::nn::Embedding(1 << 14, 64); }, rows, kResult) <=
        4 * 1.2);
  CHECK(peak_of_first_forwards(
            [] {
              return torch::nn::EmbeddingBag(
                  torch::nn::EmbeddingBagOptions(1 << 14, 64).sparse(true));
            },
            rows.unsqueeze(1), kResult) <= 4 * 1.2);
}

TEST_CASE("random values are drawn for the first module only, and its replicas copy them") {
  std::latch all(kAtOnce);
  std::atomic<int> filled{0};
  Cluster cluster = cluster_with([&] {
    Big net(all);
    const at::Tensor ones = at::ones({4});
    ones.normal_();
    if (!at::equal(ones, at::ones({4}))) ++filled;
    return net;
  });
  const RemoteModule net(cluster[0], 1, "net");
  std::vector<base::Future<at::Tensor>> passes;
  for (int i = 0; i < kAtOnce; ++i) passes.push_back(net.forward_async(at::ones({1})));
  base::wait_all(passes);
  const at::Tensor sum = net.state().at("weight").sum();
  for (const auto& pass : passes) CHECK(at::equal(pass.wait()[0], sum));
  CHECK(filled == 1);
}

TEST_CASE("two trainers in sync mode, stopped and resumed, equal torch's Adam on the mean") {
  torch::manual_seed(3);
  const auto make = [] { return PlainNet(); };
  const at::Tensor x[2] = {at::rand({4, 8}), at::rand({6, 8})};
  const optim::OptimizerOptions options = optim::Adam{.lr = 0.05};
  rpc::NamedTensors start, model;
  std::vector<optim::ParameterState> state;

  const auto train = [&](Cluster& cluster, int steps) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        const RemoteModule net(cluster[0], 1, "net");
        DistributedOptimizer optimizer(cluster[0], net.remote_parameters(), options,
                                       Sharing{Sharing::Mode::kSync, 2, t});
        for (int i = 0; i < steps; ++i) {
          autograd::Context context(cluster[0]);
          autograd::backward(context, {loss_of(net.forward(x[t]))});
          optimizer.step(context);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  const auto keeper = [&](Cluster& cluster) {
    return DistributedOptimizer(cluster[0], RemoteModule(cluster[0], 1, "net").remote_parameters(),
                                options, Sharing{Sharing::Mode::kSync, 2, 0});
  };
  {
    Cluster cluster = cluster_with(make);
    const auto kept = keeper(cluster);
    const RemoteModule net(cluster[0], 1, "net");
    start = net.state();
    train(cluster, 3);
    model = net.state();
    state = kept.state();
  }
  Cluster cluster = cluster_with(make);
  auto kept = keeper(cluster);
  const RemoteModule net(cluster[0], 1, "net");
  net.load_state(model);
  kept.load_state(state);
  train(cluster, 3);

  PlainNet oracle;
  testing::give_values(oracle, start);
  torch::optim::Adam adam(oracle->parameters(), torch::optim::AdamOptions(0.05));
  for (int i = 0; i < 6; ++i) {
    adam.zero_grad();
    (loss_of(oracle->forward(x[0])) / 2).backward();
    (loss_of(oracle->forward(x[1])) / 2).backward();
    adam.step();
  }
  const rpc::NamedTensors end = net.state();
  for (const auto& item : oracle->named_parameters()) {
    CAPTURE(item.key());
    CHECK(at::allclose(end.at(item.key()), item.value(), 1e-4, 1e-5));
  }
  CHECK_FALSE(at::allclose(start.at("in.weight"), end.at("in.weight"), 1e-2, 1e-2));
}

namespace {

// One matrix embeds words and scores them. The bias is frozen, and a buffer scales the scores.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    words = register_module("words", torch::nn::Embedding(6, 4));
    matrix = register_parameter("matrix", words->weight);
    bias = register_parameter("bias", at::rand({6}), /*requires_grad=*/false);
    scale = register_buffer("scale", at::full({1}, 2.0));
  }
  at::Tensor forward(const at::Tensor& ids) {
    return at::linear(words->forward(ids), matrix, bias) * scale;
  }
  torch::nn::Embedding words{nullptr};
  at::Tensor matrix, bias, scale;
};
TORCH_MODULE(Tied);

}  // namespace

TEST_CASE("a tied parameter counts once, a frozen one is not trained, a buffer is saved") {
  Cluster cluster = cluster_with([] { return Tied(); });
  Agent& agent = cluster[0];
  const RemoteModule net(agent, 1, "net");
  CHECK(net.remote_parameters().size() == 1);
  rpc::NamedTensors state = net.state();
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  CHECK(names == std::vector<std::string>{"bias", "matrix", "scale"});

  const at::Tensor ids = at::tensor({1, 3, 3, 5}, at::kLong);
  net.forward(ids);  // creates a replica, which has a copy of the buffer
  state["scale"] = at::full({1}, -3.0);
  state["matrix"] = at::rand({6, 4});
  net.load_state(state);
  Tied oracle;
  {
    const at::NoGradGuard no_grad;
    oracle->matrix.copy_(state["matrix"]);
    oracle->bias.copy_(state["bias"]);
    oracle->scale.copy_(state["scale"]);
  }
  const at::Tensor expected = oracle->forward(ids);
  CHECK(at::equal(net.forward(ids), expected));
  autograd::Context context(agent);
  autograd::backward(context, {loss_of(net.forward(ids))});
  check_equal(gradients_in(context, net.remote_parameters()),
              torch::autograd::grad({loss_of(expected)}, {oracle->matrix}));
}

TEST_CASE("load_state changes nothing if a value does not fit") {
  Cluster cluster = cluster_with([] { return Tied(); });
  const RemoteModule net(cluster[0], 1, "net");
  const rpc::NamedTensors state = net.state();
  const auto refused = [&](auto change) {
    rpc::NamedTensors other = state;
    for (auto& [name, tensor] : other) tensor = tensor + 1;
    change(other);
    const base::Error error = error_of([&] { net.load_state(other); });
    CHECK(error.kind == ErrorKind::kBadData);
    const rpc::NamedTensors now = net.state();
    for (const auto& [name, tensor] : state) CHECK(at::equal(now.at(name), tensor));
    return error.message;
  };
  CHECK(refused([](auto& other) { other.erase("scale"); }) ==
        "the state is not of module net: it has no scale");
  CHECK(refused([](auto& other) { other["extra"] = at::ones({1}); }) ==
        "the state is not of module net: there is no extra");
  CHECK(refused([](auto& other) { other["bias"] = at::ones({5}); }) ==
        "the state is not of module net: bias is Float [5], not Float [6]");
  CHECK(refused([](auto& other) { other["scale"] = at::ones({1}, at::kDouble); }) ==
        "the state is not of module net: scale is Double [1], not Float [1]");
}

TEST_CASE("equal names give the same module; a sent handle may outlive the first one") {
  torch::manual_seed(4);
  Cluster cluster(3, [](Agent& agent) {
    testing::setup_modules(agent);
    nn::expose_module(agent, "net",
                      [](int64_t width, double scale, const std::string& layer,
                         const std::vector<int64_t>& sizes, bool on) {
                        CHECK(layer == "out");
                        CHECK(sizes == std::vector<int64_t>{1, 2});
                        CHECK(on);
                        PlainNet net(width);
                        const at::NoGradGuard no_grad;
                        net->out->weight.mul_(scale);
                        return net;
                      });
  });
  const std::vector<int64_t> sizes{1, 2};
  const at::Tensor x = at::rand({5, 8});
  at::Tensor first;
  for (int rank : {0, 1, 2}) {
    const RemoteModule net(cluster[rank], 1, "net", 12, 2, "out", sizes, true);
    const at::Tensor y = net.forward(x);
    if (rank == 0) first = y;
    CHECK(at::equal(y, first));
  }
  // On another rank, a module with this name is a different module.
  CHECK_FALSE(
      at::equal(RemoteModule(cluster[0], 0, "net", 12, 2.0, "out", sizes, true).forward(x), first));

  const auto refusal = [&](auto... args) {
    const base::Error error = error_of([&] { RemoteModule(cluster[2], 1, "net", args...); });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.rank == 1);
    return error.message;
  };
  CHECK(
      refusal(13, 2, "out", sizes, true) ==
      "module net on rank 1 was made for rank 0 with other arguments than rank 2 gives: argument 1 "
      "is 13, not 12");
  CHECK(refusal(12, 2, "out", std::vector<int64_t>{1}, true)
            .ends_with(": argument 4 is another one"));
  CHECK(refusal(12, 2, "out", sizes) == "module net: it is made with 5 arguments, not 4");
  CHECK(refusal(12.5, 2, "out", sizes, true) ==
        "module net: argument 1 is a floating-point number, not long");
  CHECK(
      refusal(12, 2, 3, sizes, true).starts_with("module net: argument 3 is an integer, not std"));
  CHECK(refusal(12, 2, "out", std::vector<double>{1}, true)
            .starts_with("module net: argument 4 is std::vector<double"));
  CHECK(refusal(12, 2, "out", sizes, 1) == "module net: argument 5 is an integer, not bool");
  cluster.shutdown();
  for (int rank = 0; rank < 3; ++rank) CHECK(cluster[rank].live_rrefs() == 0);
}
