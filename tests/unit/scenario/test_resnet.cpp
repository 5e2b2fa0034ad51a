// ctest: labels=notsan timeout=180
#include <cmath>
#include <functional>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "scenario/pipeline/resnet.h"
#include "support/catch.h"
#include "support/files.h"

using namespace distrain;
using namespace distrain::scenario;
using rpc::NamedTensors;

namespace {

std::string refused_cut(const std::string& model, int stages,
                        const std::vector<std::string>& split) {
  return testing::error_of(base::ErrorKind::kInvalid,
                           [&] { cut_resnet(model, stages, split, 1000, 128); });
}

// Returns the blocks of each stage, as "layer1.0 layer1.1 | …".
std::string cut(const std::string& model, int stages, const std::vector<std::string>& split = {}) {
  const std::vector<std::string> blocks = resnet_blocks(model);
  std::string text;
  size_t next = 0;
  for (const BlockRange& stage : cut_resnet(model, stages, split, 1000, 128)) {
    CHECK(stage.first == next);
    CHECK(stage.first < stage.last);
    next = stage.last;
    text += (text.empty() ? "" : " | ") + blocks.at(stage.first);
    if (stage.last - stage.first > 1) text += ".." + blocks.at(stage.last - 1);
  }
  CHECK(next == blocks.size());
  return text;
}

std::vector<ResNetStage> make_stages(const std::vector<BlockRange>& cut, int64_t classes,
                                     uint64_t seed) {
  std::vector<ResNetStage> stages;
  for (const BlockRange& blocks : cut) stages.emplace_back("resnet18", classes, blocks, seed);
  return stages;
}

at::Tensor forward(std::vector<ResNetStage>& stages, at::Tensor x, bool training = true) {
  for (ResNetStage& stage : stages) x = stage.forward(x, training);
  return x;
}

NamedTensors gradients(const std::vector<ResNetStage>& stages) {
  NamedTensors gradients;
  for (const ResNetStage& stage : stages) {
    for (const auto& [name, parameter] : stage.parameters()) gradients[name] = parameter.grad();
  }
  return gradients;
}

NamedTensors state(const ResNetStage& stage) {
  NamedTensors state = stage.state();
  for (auto& [name, tensor] : state) tensor = tensor.detach().clone();
  return state;
}

int64_t parameter_count(const ResNetStage& stage) {
  int64_t count = 0;
  for (const auto& [name, parameter] : stage.parameters()) count += parameter.numel();
  return count;
}

void check_same(const NamedTensors& actual, const NamedTensors& expected) {
  REQUIRE(actual.size() == expected.size());
  for (const auto& [name, tensor] : expected) {
    CAPTURE(name);
    CHECK(at::equal(actual.at(name), tensor));
  }
}

}  // namespace

TEST_CASE("the ResNets have torchvision's number of parameters and buffers") {
  const ResNetStage resnet50("resnet50", 1000, whole_resnet("resnet50"), 1);
  CHECK(parameter_count(resnet50) == 25'557'032);
  CHECK(resnet50.parameters().size() == 161);
  CHECK(resnet50.buffers().size() == 159);
  const ResNetStage resnet18("resnet18", 1000, whole_resnet("resnet18"), 1);
  CHECK(parameter_count(resnet18) == 11'689'512);
  CHECK(resnet18.parameters().size() == 62);
  CHECK(resnet18.buffers().size() == 60);
  for (const auto& [name, parameter] : resnet18.parameters()) CHECK(parameter.requires_grad());
  for (const auto& [name, buffer] : resnet18.buffers()) CHECK_FALSE(buffer.requires_grad());
  // Checks a few names; the tests in tests/oracle compare all names with torchvision's.
  std::vector<std::string> first;
  for (size_t i = 0; i < 4; ++i) first.push_back(resnet50.parameters()[i].first);
  CHECK(first == std::vector<std::string>{"conv1.weight", "bn1.weight", "bn1.bias",
                                          "layer1.0.conv1.weight"});
  CHECK(resnet50.buffers()[2].first == "bn1.num_batches_tracked");
  CHECK(resnet50.parameters().back().first == "fc.bias");
}

TEST_CASE("other depths of a ResNet are refused") {
  for (const auto& call : std::vector<std::function<void()>>{
           [] { resnet_blocks("resnet34"); }, [] { resnet_costs("resnet34", 10, 32); },
           [] { cut_resnet("resnet34", 2, {}, 10, 32); },
           [] {
             ResNetStage("resnet34", 10, {0, 1}, 1);
           }}) {
    CHECK(testing::error_of(base::ErrorKind::kInvalid, call) ==
          "there is no model resnet34: resnet18, resnet50");
  }
  CHECK(testing::error_of(base::ErrorKind::kInvalid, [] {
          ResNetStage("resnet18", 10, {3, 11}, 1);
        }) == "no blocks 3 to 11 in resnet18");
  CHECK_THROWS(ResNetStage("resnet18", 10, {3, 3}, 1));
}

TEST_CASE("stages in a row equal the whole model bit for bit, wherever it is split") {
  const at::Tensor images = at::randn({2, 4, 3, 40, 40});
  const at::Tensor labels = at::randint(7, {2, 4}, at::kLong);
  // Runs two micro-batches forward before it runs the first one backward.
  const auto train = [&](std::vector<ResNetStage>& stages) {
    const at::Tensor first = forward(stages, images[0]);
    const at::Tensor second = forward(stages, images[1]);
    at::cross_entropy_loss(first, labels[0]).backward();
    at::cross_entropy_loss(second, labels[1]).backward();
    return at::stack({first, second});
  };
  std::vector<ResNetStage> whole = make_stages({whole_resnet("resnet18")}, 7, 3);
  const at::Tensor expected = train(whole);
  CHECK(expected.sizes() == std::vector<int64_t>{2, 4, 7});
  for (const int count : {2, 3, 4, 10}) {
    CAPTURE(count);
    std::vector<ResNetStage> stages = make_stages(cut_resnet("resnet18", count, {}, 7, 40), 7, 3);
    CHECK(at::equal(train(stages), expected));
    check_same(gradients(stages), gradients(whole));
    NamedTensors buffers;
    for (const ResNetStage& stage : stages) {
      buffers.insert(stage.buffers().begin(), stage.buffers().end());
    }
    check_same(buffers, {whole[0].buffers().begin(), whole[0].buffers().end()});
  }
}

TEST_CASE("tensors that are sent between stages are contiguous, forward and backward") {
  std::vector<ResNetStage> stages = make_stages(cut_resnet("resnet18", 2, {}, 7, 64), 7, 3);
  const at::Tensor sent = stages[0].forward(at::randn({2, 3, 64, 64}));
  CHECK(sent.sizes() == std::vector<int64_t>{2, 8, 8, 128});
  CHECK(sent.is_contiguous());
  const at::Tensor received = sent.detach().requires_grad_();
  stages[1].forward(received).sum().backward();
  CHECK(received.grad().is_contiguous());
}

TEST_CASE("the ResNets are initialized as torchvision's, depending on seed and name") {
  const ResNetStage net("resnet50", 1000, whole_resnet("resnet50"), 1);
  for (const auto& [name, parameter] : net.parameters()) {
    CAPTURE(name);
    if (name == "fc.weight" || name == "fc.bias") {
      const double bound = 1 / std::sqrt(2048.0);
      CHECK(parameter.abs().max().item<double>() <= bound);
      CHECK(parameter.abs().max().item<double>() > 0.99 * bound);
      CHECK(std::abs(parameter.mean().item<double>()) < 0.1 * bound);
    } else if (parameter.dim() == 4) {
      const auto count = static_cast<double>(parameter.numel());
      const double fan_out =
          static_cast<double>(parameter.size(0) * parameter.size(2) * parameter.size(3));
      const double std = std::sqrt(2 / fan_out);
      CHECK(std::abs(parameter.mean().item<double>()) < 5 * std / std::sqrt(count));
      CHECK(std::abs(parameter.std().item<double>() / std - 1) < 5 / std::sqrt(2 * count));
    } else {
      CHECK((parameter == (name.ends_with("weight") ? 1 : 0)).all().item<bool>());
    }
  }
  for (const auto& [name, buffer] : net.buffers()) {
    CAPTURE(name);
    CHECK((buffer == (name.ends_with("running_var") ? 1 : 0)).all().item<bool>());
  }
  const ResNetStage part("resnet50", 1000, {9, 18}, 1), other("resnet50", 1000, {9, 18}, 2);
  for (const auto& [name, parameter] : part.parameters()) {
    CAPTURE(name);
    CHECK(at::equal(parameter, net.state().at(name)));
    const bool drawn = parameter.dim() == 4 || name.starts_with("fc.");
    CHECK(at::equal(parameter, other.state().at(name)) != drawn);
  }
  CHECK_FALSE(
      at::equal(net.state().at("layer4.1.conv2.weight"), net.state().at("layer4.2.conv2.weight")));
}

TEST_CASE("training updates the running statistics, evaluation uses them") {
  std::vector<ResNetStage> net = make_stages({whole_resnet("resnet18")}, 7, 3);
  const at::Tensor images = at::randn({4, 3, 40, 40});
  const at::Tensor trained = forward(net, images);
  NamedTensors moved = state(net[0]);
  CHECK(moved.at("bn1.num_batches_tracked").item<int64_t>() == 1);
  CHECK_FALSE(at::equal(moved.at("layer4.1.bn2.running_mean"), at::zeros({512})));
  const at::Tensor evaluated = forward(net, images, false);
  check_same(state(net[0]), moved);
  CHECK_FALSE(at::allclose(evaluated, trained));
  // In evaluation, the scores of an image do not depend on its batch.
  CHECK(at::allclose(forward(net, images.narrow(0, 0, 1), false), evaluated.narrow(0, 0, 1), 1e-4,
                     1e-4));
  CHECK(at::allclose(forward(net, images), trained));
}

TEST_CASE("one value per channel is too few to train batch norm") {
  std::vector<ResNetStage> net = make_stages({whole_resnet("resnet18")}, 7, 3);
  const auto refused = [](auto call) { return testing::error_of(base::ErrorKind::kInvalid, call); };
  CHECK(refused([&] {
          forward(net, at::randn({1, 3, 32, 32}));
        }) == "batch norm layer4.0.bn1 cannot train on one value a channel");
  CHECK(refused([] { check_resnet_input(32, 1); }) ==
        "batch norm cannot train on micro-batches of one image of 32 pixels: give fewer "
        "--micro-batches, a larger --batch-size, or --image-size 33 or more");
  CHECK_THROWS(check_resnet_input(1, 1));
  for (const auto& [size, samples] : {std::pair{32, 2}, {33, 1}, {1, 2}}) {
    CAPTURE(size, samples);
    check_resnet_input(size, samples);
    CHECK(forward(net, at::randn({samples, 3, size, size})).isfinite().all().item<bool>());
  }
  forward(net, at::randn({1, 3, 32, 32}), false);
}

TEST_CASE("a ResNet is split by names, as in the tutorial, or evenly") {
  CHECK(resnet_blocks("resnet18") ==
        std::vector<std::string>{"stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0",
                                 "layer3.1", "layer4.0", "layer4.1", "head"});
  CHECK(resnet_blocks("resnet50").size() == 18);
  CHECK(cut("resnet50", 1) == "stem..head");
  CHECK(cut("resnet50", 2) == "stem..layer2.3 | layer3.0..head");
  CHECK(cut("resnet18", 2) == "stem..layer2.1 | layer3.0..head");
  CHECK(cut("resnet50", 2, {"layer3.2"}) == "stem..layer3.2 | layer3.3..head");
  CHECK(cut("resnet50", 3, {"layer2", "layer3.2"}) ==
        "stem..layer2.3 | layer3.0..layer3.2 | layer3.3..head");
  CHECK(cut("resnet50", 3, {"stem", "layer4"}) == "stem | layer1.0..layer4.2 | head");
  CHECK(cut("resnet50", 2, {"conv1"}) == "stem | layer1.0..head");
  CHECK(cut("resnet18", 10) ==
        "stem | layer1.0 | layer1.1 | layer2.0 | layer2.1 | layer3.0 | layer3.1 | layer4.0 | "
        "layer4.1 | head");
}

TEST_CASE("the automatic split minimizes the cost of the most expensive stage") {
  for (const std::string model : {"resnet18", "resnet50"}) {
    const std::vector<double> costs = resnet_costs(model, 1000, 128);
    REQUIRE(costs.size() == resnet_blocks(model).size());
    double sum = 0;
    for (const double cost : costs) sum += cost;
    const auto worst = [&](const std::vector<BlockRange>& stages) {
      double worst = 0;
      for (const BlockRange& stage : stages) {
        double cost = 0;
        for (size_t i = stage.first; i < stage.last; ++i) cost += costs[i];
        worst = std::max(worst, cost);
      }
      return worst;
    };
    double best = sum;
    for (size_t i = 1; i < costs.size(); ++i) {
      for (size_t k = i + 1; k < costs.size(); ++k) {
        best = std::min(best, worst({{0, i}, {i, k}, {k, costs.size()}}));
      }
    }
    CHECK(worst(cut_resnet(model, 3, {}, 1000, 128)) == Approx(best));
    for (const int stages : {3, 4}) {
      CHECK(worst(cut_resnet(model, stages, {}, 1000, 128)) < 1.35 * sum / stages);
    }
  }
}

TEST_CASE("an invalid split is refused") {
  const std::string blocks =
      "stem, layer1.0, layer1.1, layer2.0, layer2.1, layer3.0, layer3.1, layer4.0, layer4.1, head";
  CHECK(refused_cut("resnet18", 2, {"layer5"}) == "--split: resnet18 has no block layer5, but " +
                                                      blocks +
                                                      " (layer2 is the last block of that layer)");
  for (const char* name : {"layer", "layer2.", "layer2.2", "", "fc", "Layer2"}) {
    CHECK(refused_cut("resnet18", 2, {name}).starts_with("--split: resnet18 has no block "));
  }
  CHECK(refused_cut("resnet50", 3, {"layer2"}) ==
        "--split names 1 block to cut after, but 3 stages need 2");
  CHECK(refused_cut("resnet50", 2, {"layer2", "layer3"}) ==
        "--split names 2 blocks to cut after, but 2 stages need 1");
  CHECK(refused_cut("resnet50", 1, {"layer2"}) ==
        "--split names 1 block to cut after, but 1 stage needs 0");
  CHECK(refused_cut("resnet50", 3, {"layer3", "layer2.1"}) ==
        "--split: layer2.1 does not come after layer3");
  CHECK(refused_cut("resnet50", 3, {"layer2", "layer2.3"}) ==
        "--split: layer2.3 does not come after layer2");
  CHECK(refused_cut("resnet50", 2, {"head"}) ==
        "--split: nothing comes after head for the last stage");
  CHECK(refused_cut("resnet18", 11, {}) == "--stages 11 is more than the 10 blocks of resnet18");
  CHECK(refused_cut("resnet18", 0, {}) == "--stages must be at least 1, not 0");
}

TEST_CASE("weights are loaded into any split of stages, and are checked") {
  const ResNetStage other("resnet18", 7, whole_resnet("resnet18"), 5);
  NamedTensors weights = state(other);
  for (auto& [name, tensor] : weights) {
    if (tensor.is_floating_point()) tensor.add_(0.5);
  }
  check_weights("resnet18", 7, weights);
  NamedTensors loaded;
  for (const BlockRange& blocks : cut_resnet("resnet18", 3, {}, 7, 64)) {
    ResNetStage stage("resnet18", 7, blocks, 1);
    stage.load(weights);
    loaded.merge(state(stage));
  }
  check_same(loaded, weights);

  ResNetStage stage("resnet18", 7, {8, 10}, 1);
  const NamedTensors before = state(stage);
  const auto refused = [&](const std::string& name, const at::Tensor& tensor) {
    NamedTensors changed = weights;
    changed.erase(name);
    if (tensor.defined()) changed[name] = tensor;
    const auto message = testing::bad_data([&] { check_weights("resnet18", 7, changed); });
    CHECK(message == testing::bad_data([&] { stage.load(changed); }));
    check_same(state(stage), before);
    return message;
  };
  CHECK(refused("fc.bias", {}) == "no fc.bias among the weights");
  CHECK(refused("layer4.1.bn2.running_var", {}) == "no layer4.1.bn2.running_var among the weights");
  CHECK(refused("fc.weight", at::zeros({1000, 512})) ==
        "fc.weight has the shape [1000, 512], not [7, 512]");
  CHECK(refused("fc.bias", at::zeros({7}, at::kHalf)) == "fc.bias is of Half, not of Float");

  NamedTensors changed = weights;
  for (const auto& [name, tensor] : weights) {
    if (name.ends_with("num_batches_tracked")) changed.erase(name);
  }
  check_weights("resnet18", 7, changed);
  stage.load(changed);
  CHECK(at::equal(state(stage).at("fc.bias"), weights.at("fc.bias")));
  changed["layer4.2.conv1.weight"] = at::zeros({1});
  CHECK(testing::bad_data([&] { check_weights("resnet18", 7, changed); }) ==
        "there is layer4.2.conv1.weight, which resnet18 has not");
}
