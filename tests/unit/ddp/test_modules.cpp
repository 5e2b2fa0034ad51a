// Tests which modules DistributedDataParallel trains, and how: cases after PyTorch's tests of DDP.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "distrain/ddp/distributed_data_parallel.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"
#include "unit/ddp/manual_pass.h"

using namespace distrain;
using namespace distrain::testing;
using ddp::DistributedDataParallel;

// A namespace of its own, because a unity build joins this file with others.
namespace modules {

namespace {

constexpr int kRanks = 2;
const Backend::Settings kSettings{.timeout = std::chrono::seconds(60)};

torch::nn::Linear linear(int64_t in, int64_t out, bool bias = false) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

at::Tensor data(at::IntArrayRef sizes, int seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  return at::randn(sizes, generator);
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    auto generator = at::detail::createCPUGenerator(9);
    const at::NoGradGuard no_grad;
    for (const char* const name : {"fc1", "fc2", "fc3"}) {
      const int64_t in = name[2] == '1' ? 2 : name[2] == '2' ? 10 : 50;
      const int64_t out = name[2] == '1' ? 10 : name[2] == '2' ? 50 : 4;
      layers.push_back(register_module(name, linear(in, out)));
      layers.back()->weight.copy_(at::randn({out, in}, generator) / 3);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return layers[2]->forward(layers[1]->forward(layers[0]->forward(x).relu()).relu()).softmax(1);
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Net);

/// y = first(x), of which only some may need `second`.
struct TwoImpl : torch::nn::Module {
  TwoImpl(int64_t in, int64_t hidden, int64_t out)
      : first(register_module("first", linear(in, hidden))),
        second(register_module("second", linear(hidden, out))) {}
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Two);

struct Pair {
  at::Tensor a, b;
};
struct Nested {
  std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>> tuple;
  std::vector<std::vector<at::Tensor>> list;
  std::map<std::string, at::Tensor> map;
  at::Tensor detached;  // requires no gradient
  at::Tensor created;   // a new tensor
};
/// Takes and returns structures, as a user's module may.
struct StructuresImpl : torch::nn::Module {
  StructuresImpl() : layer(register_module("layer", linear(10, 3))) {}
  Nested forward(const Pair& in) {
    const at::Tensor y = last = layer->forward(in.a * in.b);
    return {{y, {y * 2, y * 3}}, {{y}, {y * 4, y * 5}}, {{"c", y * 6}}, y.detach(), at::ones({3})};
  }
  torch::nn::Linear layer;
  at::Tensor last;
};
TORCH_MODULE(Structures);

struct FailsBackward : torch::autograd::Function<FailsBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("this backward fails");
  }
};
struct FailingImpl : torch::nn::Module {
  FailingImpl() : layer(register_module("layer", linear(4, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (fails_forward) throw std::runtime_error("this forward fails");
    return layer->forward(fails_backward ? FailsBackward::apply(x) : x);
  }
  torch::nn::Linear layer;
  bool fails_forward = false, fails_backward = false;
};
TORCH_MODULE(Failing);

struct BufferedImpl : torch::nn::Module {
  explicit BufferedImpl(int rank) : layer(register_module("layer", linear(4, 2))) {
    buffer = register_buffer("buffer", at::full({2}, double(rank)));
  }
  at::Tensor forward(const at::Tensor& x) { return layer->forward(x) + buffer; }
  torch::nn::Linear layer;
  at::Tensor buffer;
};
TORCH_MODULE(Buffered);

struct PowerImpl : torch::nn::Module {
  PowerImpl() : p(register_parameter("p", at::ones({}))) {}
  at::Tensor forward() { return p.pow(2); }
  at::Tensor p;
};
TORCH_MODULE(Power);

/// A module of modules of which most are unused.
struct PartlyUsedImpl : torch::nn::Module {
  PartlyUsedImpl() {
    auto sub = register_module("sub_module", std::make_shared<torch::nn::Module>());
    two = sub->register_module("two", Two(10, 10, 10));
    embedding = sub->register_module("embedding_net", Two(4, 4, 4));
    layer = sub->register_module("layer", linear(4, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return two->first->forward(layer->forward(x)); }
  Two two{nullptr}, embedding{nullptr};
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(PartlyUsed);

/// Parts that may have other shapes on each rank.
struct OwnPartImpl : torch::nn::Module {
  explicit OwnPartImpl(int rank) : fc1(register_module("fc1", linear(1, 1))) {
    fc2 = register_module("fc2", linear(rank == 0 ? 1 : 10, 10));
    fc2->register_buffer("buffer", at::zeros({5 + rank}));
    const at::NoGradGuard no_grad;
    fc1->weight.fill_(0.5);
  }
  at::Tensor forward(const at::Tensor& x) { return fc2->forward(fc1->forward(x)); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(OwnPart);

}  // namespace

TEST_CASE("ranks that train on parts of a batch equal one process that trains on the whole") {
  const bool in_contexts = GENERATE(false, true);
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    Net alone;
    DistributedDataParallel model(Net(), group.backends[size_t(rank)]);
    torch::optim::SGD of_alone(alone->parameters(), 0.1), of_model(model.parameters(), 0.1);
    for (int step = 0; step < 5; ++step) {
      const at::Tensor input = data({4, 2}, 100 + step), target = data({4, 4}, 200 + step);
      const auto update = [&](auto& optimizer, const at::Tensor& loss) {
        optimizer.zero_grad();
        loss.backward();
        optimizer.step();
      };
      update(of_alone, at::mse_loss(alone->forward(input), target));
      const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, 2 * rank, 2); };
      if (!in_contexts) {
        update(of_model, at::mse_loss(model.forward(part(input)), part(target)));
      } else {
        of_model.zero_grad();
        const at::Tensor loss = at::mse_loss(model.module()->forward(part(input)), part(target));
        ManualPass pass(model.reducer());
        pass.backward(loss, model.parameters());
        std::vector<at::Tensor> gradients;
        for (const at::Tensor& p : model.parameters()) gradients.push_back(pass.gradient(p));
        // The gradients of a context are views of the buckets, here of a single one.
        for (const at::Tensor& g : gradients) RANK_CHECK(g.is_alias_of(gradients[0]));
        for (size_t i = 0; i < gradients.size(); ++i) {
          model.parameters()[i].mutable_grad() = gradients[i];
        }
        of_model.step();
      }
      for (size_t i = 0; i < 3; ++i) {
        RANK_CHECK(at::allclose(alone->parameters()[i], model.parameters()[i], 1e-5, 1e-6));
      }
    }
  });
}

TEST_CASE("a module without a parameter that requires a gradient is refused on all ranks") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    const auto message = [&](auto module) {
      return thrown_by([&] { DistributedDataParallel model(module, group.backends[size_t(rank)]); })
          .message;
    };
    const std::string wanted =
        "DistributedDataParallel: the module has no parameter that requires a gradient";
    RANK_CHECK(message(torch::nn::Tanh()) == wanted);
    torch::nn::Linear frozen(2, 2);
    for (at::Tensor& p : frozen->parameters()) p.set_requires_grad(false);
    RANK_CHECK(message(frozen) == wanted);
  });
}

TEST_CASE("a parameter may have no element, and a gradient may itself have a graph") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    DistributedDataParallel model(
        torch::nn::Sequential(torch::nn::Linear(10, 10), torch::nn::ReLU(),
                              torch::nn::Linear(10, 0)),
        group.backends[size_t(rank)]);
    model.forward(at::ones({2, 10})).sum().backward();
    RANK_CHECK(model.parameters()[2].grad().sizes() == at::IntArrayRef({0, 10}));

    DistributedDataParallel power(Power(), group.backends[size_t(rank)]);
    for (int step = 1; step <= 6; ++step) {
      torch::autograd::backward({power.forward() * double(rank + 1)}, {}, std::nullopt, true);
      RANK_CHECK(power.module()->p.requires_grad());
      RANK_CHECK(power.module()->p.grad().item<float>() == 3.0F * float(step));
    }
    power.module()->p.mutable_grad().reset();  // or gradient and graph would own each other
  });
}

TEST_CASE("the values of parameters and buffers may come from any rank") {
  TestGroup group(3, kSettings);
  run_ranks(3, [&](int rank) {
    DistributedDataParallel model(linear(2, 2), group.backends[size_t(rank)]);
    for (const int root : {1, 2, 0}) {
      const at::NoGradGuard no_grad;
      model.module()->weight.fill_(double(10 * root + rank));
      ddp::broadcast_values(model.parameters(), model.reducer().group(), root);
      RANK_CHECK(at::equal(model.module()->weight, at::full({2, 2}, 11.0 * root)));
    }
  });
}

TEST_CASE("ignored parameters and buffers may differ between ranks, and are not averaged") {
  const bool is_static = GENERATE(false, true);
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    OwnPart module(rank);
    const at::Tensor before = module->fc2->weight;
    const std::string message = thrown_by([&] {
                                  DistributedDataParallel all(module, group.backends[size_t(rank)]);
                                }).message;
    RANK_CHECK(contains(message, "fc2.weight"));
    DistributedDataParallel model(module, group.backends[size_t(rank)], {.static_graph = is_static},
                                  {"fc2.weight", "fc2.buffer"});
    RANK_CHECK(model.reducer().buckets() == std::vector<std::vector<std::string>>{{"fc1.weight"}});
    module->fc2 = module->replace_module("fc2", linear(1, 1));
    {
      const at::NoGradGuard no_grad;
      module->fc2->weight.fill_(2.0);
    }
    for (int step = 1; step <= 6; ++step) {
      const double x = rank + 1;
      model.forward(at::full({1}, x)).sum().backward();
      RANK_CHECK(module->fc2->weight.grad().item<double>() == step * 0.5 * x);  // this rank's own
      RANK_CHECK(module->fc1->weight.grad().item<double>() == step * 2 * 1.5);  // the mean
    }
    RANK_CHECK(!before.grad().defined());
  });
}

TEST_CASE("each parameter without a gradient is named in full, and no other") {
  const bool ignores = GENERATE(false, true);
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    std::set<std::string> ignored;
    if (ignores) ignored = {"sub_module.embedding_net.first.weight"};
    DistributedDataParallel model(PartlyUsed(), group.backends[size_t(rank)], {}, ignored);
    for (int step = 0; step < 2; ++step) {
      const base::Error error = thrown_by([&] {
        model.forward(at::ones({10, 4})).sum().backward();
      });
      RANK_CHECK(error.kind == base::ErrorKind::kInvalid);
      RANK_CHECK(contains(error.message, "rank " + std::to_string(error.rank)));
      for (const auto& item : model.module()->named_parameters()) {
        const bool used =
            contains(item.key(), "two.first") || contains(item.key(), "sub_module.layer");
        const bool named = contains(error.message, "'" + item.key() + "'");
        RANK_CHECK(named == (!used && !ignored.contains(item.key())));
      }
    }
  });
}

TEST_CASE("a module may take and return structures; outputs are the module's own tensors") {
  const bool is_static = GENERATE(false, true), finds_unused = GENERATE(false, true);
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    DistributedDataParallel model(
        Structures(), group.backends[size_t(rank)],
        {.find_unused_parameters = finds_unused, .static_graph = is_static});
    const auto in = [](int of) { return Pair{data({5, 10}, of), data({5, 10}, 50 + of)}; };
    for (int step = 0; step < 6; ++step) {
      const int shape = step % 3;
      const auto loss_of = [&](const Nested& out) {
        const auto& [y, two] = out.tuple;
        if (shape == 0) return (y + std::get<0>(two) + std::get<1>(two)).sum();
        if (shape == 1) return (out.list[0][0] + out.list[1][0] + out.list[1][1]).sum();
        return (out.map.at("c") + out.detached + out.created).sum();
      };
      const Nested out = model.forward(in(rank));
      RANK_CHECK(std::get<0>(out.tuple).is_same(model.module()->last));
      RANK_CHECK(!out.detached.requires_grad());
      RANK_CHECK(!out.created.grad_fn());
      loss_of(out).backward();
      at::Tensor wanted = at::zeros({3, 10});
      for (int of = 0; of < kRanks; ++of) {
        const at::Tensor weight = model.module()->layer->weight.detach().clone().requires_grad_();
        Structures alone;
        alone->layer->weight = weight;
        loss_of(alone->forward(in(of))).backward();
        wanted += weight.grad() / kRanks;
      }
      RANK_CHECK(at::allclose(model.module()->layer->weight.grad(), wanted, 1e-5, 1e-5));
      model.module()->zero_grad();
    }
  });
}

TEST_CASE("the error of a module's forward is thrown to its caller, and training goes on") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    DistributedDataParallel model(Failing(), group.backends[size_t(rank)]);
    for (const bool fails : {true, false, true, false}) {
      model.module()->fails_forward = fails;
      std::string message;
      try {
        model.forward(at::ones({3, 4})).sum().backward();
      } catch (const std::exception& e) {
        message = e.what();
      }
      RANK_CHECK(message == (fails ? "this forward fails" : ""));
    }
    RANK_CHECK(model.module()->layer->weight.grad().defined());
  });
}

TEST_CASE("after a failed pass another DistributedDataParallel may train the same module") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    Failing module;
    module->fails_backward = true;
    {
      DistributedDataParallel model(module, group.backends[size_t(rank)]);
      bool failed = false;
      try {
        model.forward(at::ones({3, 4}).requires_grad_()).sum().backward();
      } catch (const std::exception&) {
        failed = true;
      }
      RANK_CHECK(failed);
    }
    module->fails_backward = false;
    module->zero_grad();
    DistributedDataParallel model(module, group.backends[size_t(rank)]);
    model.forward(at::full({3, 4}, double(rank))).sum().backward();
    RANK_CHECK(at::allclose(module->layer->weight.grad(), at::full({2, 4}, 1.5)));
  });
}

TEST_CASE("a buffer that rank 0 changes or replaces is copied before the next forward") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    Buffered module(rank);
    DistributedDataParallel model(module, group.backends[size_t(rank)]);
    for (int step = 1; step <= 2; ++step) {
      if (rank == 0) {
        const at::Tensor replaced = module->buffer + 1;
        module->buffer.set_data(replaced);
      }
      model.forward(at::ones({2, 4})).sum().backward();
      RANK_CHECK(at::equal(module->buffer, at::full({2}, double(step))));
    }
  });
}

TEST_CASE("one rank alone may evaluate, in eval mode") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    torch::nn::Sequential module(linear(10, 2), torch::nn::BatchNorm1d(2));
    DistributedDataParallel model(module, group.backends[size_t(rank)]);
    if (rank != 0) return;
    module->eval();
    const at::Tensor x = data({10, 10}, 1);
    for (int i = 0; i < 6; ++i) {
      RANK_CHECK(at::equal(model.forward(x), module->forward(x)));
      const at::NoGradGuard no_grad;
      RANK_CHECK(at::equal(model.forward(x), module->forward(x)));
    }
  });
}

TEST_CASE("ranks whose data ends at different steps train together until no rank has data") {
  const bool over_data = GENERATE(false, true);
  const int fewest = GENERATE(0, 3);
  constexpr int kThree = 3;
  TestGroup group(kThree, kSettings);
  const auto steps_of = [&](int rank) { return fewest + 2 * rank; };
  run_ranks(kThree, [&](int rank) {
    Buffered module(0);
    {
      const at::NoGradGuard no_grad;
      module->layer->weight.zero_();
    }
    DistributedDataParallel model(module, group.backends[size_t(rank)]);
    int step = 0;
    at::Tensor wanted = at::zeros({2, 4});
    while (const int ranks = model.ranks_with_data(step < steps_of(rank))) {
      int left = 0;
      for (int other = 0; other < kThree; ++other) left += step < steps_of(other) ? 1 : 0;
      RANK_CHECK(ranks == left);
      if (over_data) model.reducer().scale_means(double(kThree) / ranks);
      const bool has_data = step < steps_of(rank);
      (has_data ? model.forward(at::full({1, 4}, 50.0)).sum() : model.forward_without_data())
          .backward();
      const at::Tensor gradient = module->layer->weight.grad();
      RANK_CHECK(
          at::allclose(gradient, at::full({2, 4}, over_data ? 50.0 : 50.0 * ranks / kThree)));
      const at::NoGradGuard no_grad;
      wanted -= 0.5 * (over_data ? 50.0 : 50.0 * ranks / kThree);
      module->layer->weight.sub_(gradient, 0.5);
      module->zero_grad();
      ++step;
    }
    RANK_CHECK(step == steps_of(kThree - 1));
    RANK_CHECK(at::allclose(module->layer->weight.detach(), wanted));
  });
}

TEST_CASE("ranks with uneven data train together with hooks and no_sync() in some steps") {
  // After PyTorch's test: a rank steps by its own gradients in no_sync(), so the ranks' parameters
  // differ until the end, when all ranks get those of the rank that has had data for longest.
  const int fewest = GENERATE(0, 2), interval = GENERATE(1, 2, 3);
  const bool has_hook = GENERATE(false, true);
  constexpr int kThree = 3;
  ddp::CommHook hook{"two averages", {}, 2};  // as PowerSGD
  hook.run = [](const std::shared_ptr<ddp::GradientBucket>& bucket) {
    auto first = std::make_shared<std::future<at::Tensor>>(bucket->average(bucket->tensor / 2));
    return std::async(std::launch::deferred, [bucket, first] {
      return first->get() + bucket->average(bucket->tensor / 2).get();
    });
  };
  TestGroup group(kThree, kSettings);
  std::vector<at::Tensor> weights(kThree);
  run_ranks(kThree, [&](int rank) {
    Buffered module(0);
    DistributedDataParallel model(
        module, group.backends[size_t(rank)],
        {.bucket_cap_bytes = 8, .hook = has_hook ? hook : ddp::CommHook()});
    int step = 0, own = 0;
    for (; model.ranks_with_data(own < fewest + 3 * rank); ++step) {
      const bool has_data = own < fewest + 3 * rank;
      own += has_data ? 1 : 0;
      const auto guard = model.no_sync(step % interval != 0);
      (has_data ? model.forward(at::full({1, 4}, 2.0)).sum() : model.forward_without_data())
          .backward();
      const at::NoGradGuard no_grad;
      module->layer->weight.add_(module->layer->weight.grad());
      module->zero_grad();
    }
    RANK_CHECK(step == fewest + 3 * (kThree - 1) && own == fewest + 3 * rank);
    ddp::broadcast_values(model.parameters(), model.reducer().group(), kThree - 1);
    weights[size_t(rank)] = module->layer->weight.detach().clone();
  });
  for (const at::Tensor& each : weights) CHECK(same_bits(each, weights[0]));
}

TEST_CASE("a job may end when the first rank has no more data") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    DistributedDataParallel model(linear(2, 40), group.backends[size_t(rank)]);
    const int steps = rank == 0 ? 10 : 5;
    int made = 0;
    while (model.ranks_with_data(made < steps) == kRanks) {
      model.forward(at::ones({10, 2})).sum().backward();
      ++made;
    }
    RANK_CHECK(made == 5);
  });
}

TEST_CASE("local steps with their sum as learning rate equal steps of ranks with uneven data") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    const at::Tensor x = data({3, 10}, 4);  // the same on both ranks
    torch::nn::Linear alone = linear(10, 10), module = linear(10, 10);
    {
      const at::NoGradGuard no_grad;
      alone->weight.fill_(0.25);
      module->weight.fill_(0.25);
    }
    torch::optim::SGD of_alone(alone->parameters(), 0.03);
    for (int i = 0; i < 2 + 4; ++i) {
      of_alone.zero_grad();
      alone->forward(x).sum().backward();
      of_alone.step();
    }
    DistributedDataParallel model(module, group.backends[size_t(rank)]);
    torch::optim::SGD of_model(module->parameters(), 0.03 * kRanks);
    for (int step = 0; model.ranks_with_data(step < 2 * (rank + 1)) > 0; ++step) {
      of_model.zero_grad();
      const bool has_data = step < 2 * (rank + 1);
      (has_data ? model.forward(x).sum() : model.forward_without_data()).backward();
      of_model.step();
    }
    RANK_CHECK(at::allclose(module->weight, alone->weight, 1e-5, 1e-6));
  });
}

TEST_CASE(
    "with find_unused_parameters ranks may leave out parameters, the same or different ones") {
  const bool in_contexts = GENERATE(false, true);
  const bool same_on_all = GENERATE(true, false);
  const size_t cap = GENERATE(size_t{1}, size_t{1} << 20);
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    DistributedDataParallel model(
        Two(10, 10, 10), group.backends[size_t(rank)],
        {.bucket_cap_bytes = cap, .first_bucket_bytes = cap, .find_unused_parameters = true});
    Two& two = model.module();
    const at::Tensor x = at::full({20, 10}, double(rank + 1));
    at::Tensor kept;  // the gradient of the second layer when all ranks leave it out
    for (int step = 0; step < 6; ++step) {
      const auto uses = [&](int of) { return step % 2 == 1 && (same_on_all || of == 1); };
      std::optional<ManualPass> pass;
      const auto gradient = [&](const at::Tensor& p) {
        return pass ? pass->gradient(p) : p.grad();
      };
      if (!in_contexts) two->first->zero_grad();
      if (uses(1)) two->zero_grad();
      const at::Tensor hidden = in_contexts ? two->first->forward(x) : at::Tensor();
      if (in_contexts) {
        pass.emplace(model.reducer());
        const at::Tensor out = uses(rank) ? two->second->forward(hidden) : hidden;
        pass->backward(out.sum(), model.parameters());
      } else {
        model.reducer().count_forward();
        const at::Tensor out = two->first->forward(x);
        (uses(rank) ? two->second->forward(out) : out).sum().backward();
      }
      const int users = uses(0) ? kRanks : uses(1) ? 1 : 0;
      RANK_CHECK(at::equal(model.reducer().used(), at::tensor({kRanks, users}, at::kInt)));
      at::Tensor wanted = at::zeros({10, 10});
      for (int of = 0; of < kRanks; ++of) {
        if (!uses(of)) continue;
        const at::Tensor in = at::linear(at::full({20, 10}, double(of + 1)), two->first->weight);
        wanted += in.detach().sum(0).expand({10, 10}) / kRanks;
      }
      const at::Tensor second = gradient(two->second->weight);
      if (users > 0) RANK_CHECK(at::allclose(second, wanted, 1e-4, 1e-4));
      if (users == 0) RANK_CHECK(second.defined() == (!in_contexts && step > 0));
      if (users == 0 && step > 0 && !in_contexts) RANK_CHECK(at::equal(second, kept));
      if (second.defined()) kept = second.clone();
      RANK_CHECK(gradient(two->first->weight).defined());
    }
  });
}

TEST_CASE(
    "with find_unused_parameters an unused parameter may have two names, and gradients add up") {
  TestGroup group(kRanks, kSettings);
  run_ranks(kRanks, [&](int rank) {
    Two two(3, 3, 3);
    two->register_parameter("tied", two->second->weight);
    DistributedDataParallel model(two, group.backends[size_t(rank)],
                                  {.find_unused_parameters = true});
    for (int step = 0; step < 6; ++step) {
      // Rank 1 uses the second layer in the first step only; its gradient stays part of the mean.
      const at::Tensor hidden = model.module()->first->forward(at::ones({1, 3}));
      model.reducer().count_forward();
      const bool uses = step == 0 ? rank == 1 : rank == 0 && step == 1;
      (uses ? hidden.sum() + two->second->weight.sum() : hidden.sum()).div(10).backward();
      RANK_CHECK(
          at::allclose(two->second->weight.grad(), at::full({3, 3}, step == 0 ? 0.05 : 0.1)));
    }
  });
}

}  // namespace modules
