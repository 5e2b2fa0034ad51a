// Compares our ResNet50 with torchvision's. tests/python/torchvision.sh runs this test with the
// folder that tests/python/resnet.py has written.
#include <cstdlib>
#include <string>

#include "oracle/resnet_checks.h"

namespace distrain::oracle {

TEST_CASE("our ResNet50 equals torchvision's with torchvision's random weights", "[.torchvision]") {
  const char* folder = std::getenv("DISTRAIN_TORCHVISION");
  REQUIRE(folder);
  const NamedTensors weights =
      store::read_safetensors(std::string(folder) + "/weights.safetensors");
  const NamedTensors expected = store::read_safetensors(std::string(folder) + "/pass.safetensors");
  scenario::check_weights("resnet50", 1000, weights);
  std::vector<ResNetStage> stages;
  for (const auto& blocks : scenario::cut_resnet("resnet50", 3, {}, 1000, 96)) {
    stages.emplace_back("resnet50", 1000, blocks, 1).load(weights);
  }
  const auto forward = [&](at::Tensor x, bool training = true) {
    for (ResNetStage& stage : stages) x = stage.forward(x, training);
    return x;
  };
  const at::Tensor images = expected.at("images");
  check_near(forward(images, false), expected.at("evaluated"), kTolerance);
  check_near(forward(images), expected.at("trained"), kTrainingTolerance);

  for (ResNetStage& stage : stages) {
    stage.load(weights);
    make_double(stage);
  }
  const at::Tensor output = forward(images.narrow(0, 0, 4).to(at::kDouble));
  at::cross_entropy_loss(output, expected.at("labels").narrow(0, 0, 4)).backward();
  size_t compared = 0;
  const auto check = [&](const std::string& name, const at::Tensor& tensor) {
    CAPTURE(name);
    const at::Tensor& other = expected.at(name);
    const double norm = other.to(at::kDouble).norm().item<double>();
    CHECK((tensor - other).to(at::kDouble).norm().item<double>() <= kDoubleTolerance * norm);
    ++compared;
  };
  for (const ResNetStage& stage : stages) {
    for (const auto& [name, parameter] : stage.parameters()) {
      check("gradient." + name, parameter.grad());
    }
    for (const auto& [name, buffer] : stage.buffers()) check("buffer." + name, buffer);
  }
  CHECK(compared == 161 + 159);
}

}  // namespace distrain::oracle
