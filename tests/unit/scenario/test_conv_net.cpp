#include <cmath>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/pooling.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "scenario/ps/ps.h"
#include "support/catch.h"

using namespace distrain;
using nn::Dropout;
using rpc::NamedTensors;
using scenario::ConvNet;

namespace {

// The network of PyTorch's tutorial, built from torch.nn modules.
struct TorchConvNet final : torch::nn::Module {
  TorchConvNet() {
    conv1 = register_module("conv1", torch::nn::Conv2d(1, 32, 3));
    conv2 = register_module("conv2", torch::nn::Conv2d(32, 64, 3));
    fc1 = register_module("fc1", torch::nn::Linear(9216, 128));
    fc2 = register_module("fc2", torch::nn::Linear(128, 10));
  }
  at::Tensor forward(at::Tensor x) {
    namespace F = torch::nn::functional;
    x = F::relu(conv2(F::relu(conv1(x))));
    x = F::max_pool2d(x, F::MaxPool2dFuncOptions(2)).flatten(1);
    return F::log_softmax(fc2(F::relu(fc1(x))), 1);
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};

}  // namespace

TEST_CASE("the parameters of the ConvNet have PyTorch's names, shapes and number") {
  const ConvNet net(1);
  TorchConvNet other;
  int64_t count = 0;
  const NamedTensors named = net.named_parameters();
  const auto expected = other.named_parameters();
  REQUIRE(named.size() == 8);
  REQUIRE(expected.size() == 8);
  for (size_t i = 0; i < 8; ++i) {
    const auto& item = expected[i];
    CAPTURE(item.key());
    CHECK(ConvNet::names()[i] == item.key());
    CHECK(named.at(item.key()).is_same(net.parameters()[i]));
    CHECK(net.parameters()[i].sizes() == item.value().sizes());
    CHECK(net.parameters()[i].requires_grad());
    count += net.parameters()[i].numel();
  }
  CHECK(count == 1'199'882);
}

TEST_CASE("without dropout the ConvNet has PyTorch's output and gradients") {
  const ConvNet net(1);
  TorchConvNet other;
  {
    const at::NoGradGuard no_grad;
    for (const auto& item : other.named_parameters()) {
      item.value().copy_(net.named_parameters().at(item.key()));
    }
  }
  const at::Tensor images = at::randn({3, 1, 28, 28});
  const at::Tensor targets = at::randint(10, {3}, at::kLong);
  const at::Tensor scores = ConvNet::forward(net.parameters(), images, Dropout());
  const at::Tensor expected = other.forward(images);
  REQUIRE(scores.sizes() == std::vector<int64_t>{3, 10});
  CHECK(at::allclose(scores, expected));
  CHECK(at::allclose(scores.exp().sum(1), at::ones({3})));
  at::nll_loss(scores, targets).backward();
  at::nll_loss(expected, targets).backward();
  for (const auto& item : other.named_parameters()) {
    CAPTURE(item.key());
    CHECK(at::allclose(net.named_parameters().at(item.key()).grad(), item.value().grad(), 1e-4,
                       1e-6));
  }
}

TEST_CASE("the ConvNet is initialized as torch.nn's layers are, depending on the seed") {
  const ConvNet net(1), same(1), other(2);
  const std::vector<double> fans_in = {9, 9, 288, 288, 9216, 9216, 128, 128};
  for (size_t i = 0; i < fans_in.size(); ++i) {
    CAPTURE(ConvNet::names()[i]);
    const at::Tensor& parameter = net.parameters()[i];
    const double bound = 1 / std::sqrt(fans_in[i]);
    CHECK(parameter.abs().max().item<double>() <= bound);
    CHECK(parameter.abs().max().item<double>() > bound / 2);
    CHECK(at::equal(parameter, same.parameters()[i]));
    CHECK_FALSE(at::equal(parameter, other.parameters()[i]));
  }
}

TEST_CASE("the ConvNet's dropout depends on its key") {
  const ConvNet net(1);
  const at::Tensor images = at::randn({3, 1, 28, 28});
  const auto scores = [&](Dropout dropout, std::optional<double> rate = {}) {
    return ConvNet::forward(net.parameters(), images, std::move(dropout), rate);
  };
  CHECK(at::equal(scores(Dropout({4})), scores(Dropout({4}))));
  CHECK_FALSE(at::equal(scores(Dropout({4})), scores(Dropout({5}))));
  CHECK_FALSE(at::equal(scores(Dropout({4})), scores(Dropout())));
  CHECK_FALSE(at::equal(scores(Dropout({4})), scores(Dropout({4}), 0.25)));
  CHECK_FALSE(at::equal(scores(Dropout({4})), scores(Dropout({4}), 0.5)));
  CHECK(at::equal(scores(Dropout({4}), 0), scores(Dropout())));
}

TEST_CASE("tensors go to the server with the fewest bytes, the largest first") {
  using Servers = std::vector<size_t>;
  CHECK(scenario::spread_by_size({}, 2).empty());
  CHECK(scenario::spread_by_size({4, 1, 9}, 1) == Servers{0, 0, 0});
  CHECK(scenario::spread_by_size({1, 2, 3, 4}, 2) == Servers{0, 1, 1, 0});
  CHECK(scenario::spread_by_size({5, 5, 5, 5}, 3) == Servers{0, 1, 2, 0});
  CHECK(scenario::spread_by_size({1, 8, 1, 3}, 2) == Servers{1, 0, 1, 1});
  CHECK(scenario::spread_by_size({7}, 3) == Servers{0});
}

TEST_CASE("the servers of a ConvNet hold all of its parameters once, with the values of one net") {
  const ConvNet whole(3);
  CHECK(ConvNet::server_of_each(2) == std::vector<size_t>{1, 1, 1, 1, 0, 1, 1, 1});
  CHECK(ConvNet::server_of_each(3) == std::vector<size_t>{2, 2, 1, 2, 0, 2, 2, 2});
  for (int servers = 1; servers <= 8; ++servers) {
    CAPTURE(servers);
    NamedTensors all;
    for (int server = 0; server < servers; ++server) {
      NamedTensors share = ConvNet(3, {c10::kCPU}, servers, server).named_parameters();
      CHECK_FALSE(share.empty());
      all.merge(share);
      CHECK(share.empty());  // no name is on two servers
    }
    REQUIRE(all.size() == 8);
    for (const auto& [name, parameter] : whole.named_parameters()) {
      CAPTURE(name);
      CHECK(at::equal(all.at(name), parameter));
      CHECK(all.at(name).requires_grad());
    }
  }
}
